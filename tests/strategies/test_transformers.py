"""Models of the `transformers` package, which know nothing of this library, train at every stage as
they would alone.

They bring what models made for a test lack: outputs that are dataclasses; weights and biases shared
by encoder, decoder and head; one block that runs several times; experts without a token on some
ranks; frozen and convolutional parts; batch statistics; losses that the model itself takes over
unequal numbers of labels.

All are tiny, with random weights; nothing is downloaded. One job per world trains them all: a rank
needs longer to import the package than to train one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_jobs import distance
from torch import Tensor, nn

import ddpz_lite as dz

pytestmark = pytest.mark.rest

STAGES = (0, 1, 2, 3)
STEPS = 3
PER_RANK = 2  # samples of one rank in one step
VOCABULARY, LENGTH, WIDTH, LAYERS = 60, 7, 16, 2
IGNORED = -100  # the label of a position that does not count
CLOSE = 2e-6  # fp32 rounding after three steps

# [Note: eps] Some gradients are zero but for rounding: those of the bias of attention's keys. Adam
# divides a gradient by its own size, so with the usual eps of 1e-8 it would step by the sign of a
# rounding error. And with a large eps a gradient that is wrong by a factor shows, which Adam hides.
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}

Batch = dict[str, Any]


# -- data: keyword arguments of a model that returns an output with a `.loss`


def tokens(samples: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (samples, LENGTH))


def next_token(samples: int) -> Batch:
    ids = tokens(samples)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def masked(samples: int) -> Batch:
    """Padded sequences with some tokens to guess, not equally many in each."""
    ids, mask = tokens(samples), torch.ones(samples, LENGTH, dtype=torch.long)
    labels = torch.full((samples, LENGTH), IGNORED)
    for row in range(samples):
        guesses = 1 + row % 4
        labels[row, :guesses] = ids[row, :guesses]
        ids[row, :guesses] = 1
        mask[row, LENGTH - row % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def translated(samples: int) -> Batch:
    """Targets of different lengths."""
    labels = tokens(samples)
    for row in range(samples):
        labels[row, LENGTH - row % 3 :] = IGNORED
    return {"input_ids": tokens(samples), "labels": labels, "use_cache": False}


def pictures(samples: int) -> Batch:
    return {"pixel_values": torch.randn(samples, 3, 12, 12), "labels": torch.arange(samples) % 5}


def speech(samples: int) -> Batch:
    sound = torch.randn(samples, 8, 20)  # (samples, mel bins, frames)
    return {"input_features": sound, "labels": tokens(samples), "use_cache": False}


# -- models


@dataclass(frozen=True)
class Case:
    """A class of transformers with the options of its configuration, and its data.

    whole_batch: False where a sample's neighbours matter (dropout, batch statistics, the balance of
        experts): there one process takes the ranks' parts one by one.
    skips: some parameters get no gradient on some ranks.
    recomputed: activations are recomputed in backward.
    """

    cls: str
    config: dict[str, Any]
    inputs: Callable[[int], Batch]
    whole_batch: bool = True
    skips: bool = False
    recomputed: bool = False


TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
BLOCKS = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
ENCODER = {
    **TEXT,
    **BLOCKS,
    "max_position_embeddings": LENGTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DECODER = {**TEXT, **BLOCKS, "max_position_embeddings": LENGTH, "num_key_value_heads": 2}
EXPERTS = {
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,  # adds the loss that balances experts
    "router_aux_loss_coef": 0.1,
}
GPT2 = {**TEXT, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2}
T5 = {
    **TEXT,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": LAYERS,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
SWITCH = {
    "num_decoder_layers": LAYERS,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_experts": 8,
    "expert_capacity": LENGTH,
    "router_jitter_noise": 0.0,
}
WHISPER = {
    **TEXT,
    "num_mel_bins": 8,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_source_positions": 10,
    "max_target_positions": LENGTH,
    "decoder_start_token_id": 0,
}


def drop(probability: float) -> dict[str, float]:
    return dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), probability)


CASES = {
    "GPT-2, tied": Case("GPT2LMHeadModel", GPT2 | drop(0.0), next_token),
    "GPT-2, dropout, recomputed": Case(
        "GPT2LMHeadModel", GPT2 | drop(0.2), next_token, whole_batch=False, recomputed=True
    ),
    "Llama, grouped queries": Case("LlamaForCausalLM", DECODER, next_token),
    "BERT, weight and bias tied": Case(
        "BertForMaskedLM", ENCODER | {"attn_implementation": "eager"}, masked
    ),
    "ALBERT, one block run twice": Case(
        "AlbertForMaskedLM", ENCODER | {"embedding_size": 8}, masked
    ),
    "T5, encoder, decoder and head tied": Case("T5ForConditionalGeneration", T5, translated),
    "Mixtral": Case(
        "MixtralForCausalLM",
        DECODER | {"num_local_experts": 4, "experts_implementation": "eager"},
        next_token,
    ),
    "Qwen2-MoE, balanced": Case(
        "Qwen2MoeForCausalLM", DECODER | EXPERTS, next_token, whole_batch=False
    ),
    "Switch, experts without a token": Case(
        "SwitchTransformersForConditionalGeneration",
        T5 | SWITCH,
        translated,
        whole_batch=False,
        skips=True,
    ),
    "ViT": Case(
        "ViTForImageClassification",
        BLOCKS | {"image_size": 12, "patch_size": 4, "num_labels": 5},
        pictures,
    ),
    "ResNet, batch statistics": Case(
        "ResNetForImageClassification",
        {"embedding_size": 6, "hidden_sizes": [6, 8], "depths": [1, 2], "num_labels": 5}
        | {"layer_type": "basic"},
        pictures,
        whole_batch=False,
    ),
    "Whisper, frozen positions": Case(
        "WhisperForConditionalGeneration", WHISPER | {"dropout": 0.0}, speech
    ),
    "Mamba": Case(
        "MambaForCausalLM",
        TEXT | {"hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": LAYERS},
        next_token,
    ),
}


def build(case: Case) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    cls = getattr(transformers, case.cls)
    model = cls(cls.config_class(**case.config)).train()
    if case.recomputed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


# -- training: the same steps in one process, under torch's DDP, and at every stage


def batches(case: Case) -> list[Batch]:
    torch.manual_seed(7)
    return [case.inputs(PER_RANK * dist.get_world_size()) for _ in range(STEPS)]


def part(batch: Batch, rank: int) -> Batch:
    rows = slice(rank, None, dist.get_world_size())
    return {k: v[rows].contiguous() if isinstance(v, Tensor) else v for k, v in batch.items()}


def labels(batch: Batch) -> int:
    """How many the model's loss is the mean of."""
    return int((batch["labels"] != IGNORED).sum())


def loss_of(model: nn.Module, batch: Batch, step: int, rank: int) -> Tensor:
    torch.manual_seed(10 * step + rank)  # dropout differs from rank to rank and from step to step
    return model(**batch).loss


def alone(case: Case) -> tuple[dict[str, Tensor], int]:
    """One process: its state and losses, and the elements of its optimizer's state."""
    model, world, losses = build(case), dist.get_world_size(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    for step, batch in enumerate(batches(case)):
        before, terms = [b.clone() for b in model.buffers()], []
        for rank in reversed(range(world)):  # rank 0 last: its buffers stay
            if case.whole_batch and rank > 0:
                continue
            for buffer, start in zip(model.buffers(), before, strict=True):
                buffer.copy_(start)
            own = batch if case.whole_batch else part(batch, rank)
            share = labels(own) / labels(batch)  # one number, as a rank's weight is: one rounding
            loss = loss_of(model, own, step, rank) * share
            loss.backward()
            terms.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(terms))
    return clone(model) | {"losses": torch.stack(losses)}, state_elements(optimizer)


def loop(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weight: Callable[[Batch, Batch], float],
) -> Tensor:
    """This rank's part of the steps; returns the mean losses, (STEPS,).

    `weight(own, batch)` makes the mean over ranks of the parts' means the mean of the whole.
    """
    rank, losses = dist.get_rank(), []
    for step, batch in enumerate(batches(case)):
        own = part(batch, rank)
        loss = loss_of(model, own, step, rank) * weight(own, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def torch_ddp(case: Case) -> dict[str, Tensor]:
    module = build(case)
    model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=case.skips)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], **ADAMW)
    world = dist.get_world_size()
    losses = loop(case, model, optimizer, lambda own, batch: labels(own) * world / labels(batch))
    return clone(module) | {"losses": losses}


def ours(case: Case, stage: int, **options: Any) -> tuple[dict[str, Tensor], nn.Module, Any]:
    model, optimizer = dz.parallelize(
        build(case), torch.optim.AdamW, stage, bucket_mb=0.016, **options, **ADAMW
    )
    losses = loop(case, model, optimizer, lambda own, _: model.batch_weight(labels(own)))
    return dz.full_state_dict(model) | {"losses": losses}, model, optimizer


def clone(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def state_elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(state["exp_avg"].numel() for state in optimizer.state.values())


def elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def ties(module: nn.Module) -> list[list[str]]:
    """The groups of names that are one parameter."""
    names = defaultdict(list)
    for name, param in module.named_parameters(remove_duplicate=False):
        names[param].append(name)
    return [several for several in names.values() if len(several) > 1]


def evaluate(model: nn.Module, batch: Batch) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(**batch).logits


@dataclass(frozen=True)
class Trained:
    """What one rank saw of one model at one stage; distances: parameters, buffers, losses."""

    to_alone: float
    to_torch: float
    to_zero2: float
    held: tuple[int, int]  # elements of parameters: here, and in one process
    state: tuple[int, int]  # elements of optimizer state: here, and in one process
    still_tied: bool
    evaluates: bool  # as the plain module does once it has loaded the full state


def train_all(names: list[str]) -> dict[tuple[str, int], Trained]:
    torch.set_num_threads(1)  # the models are too small for more
    found = {}
    for name in names:
        case = CASES[name]
        (one, state_alone), peer = alone(case), torch_ddp(case)
        results = {stage: ours(case, stage) for stage in STAGES}
        probe = part(batches(case)[0], dist.get_rank())
        for stage, (state, model, optimizer) in results.items():
            plain = build(case)
            tied = ties(plain)
            plain.load_state_dict({k: v for k, v in state.items() if k != "losses"})
            found[name, stage] = Trained(
                to_alone=distance(state, one),
                to_torch=distance(state, peer),
                to_zero2=distance(state, results[2][0]),
                held=(elements(model), elements(plain)),
                state=(state_elements(optimizer), state_alone),
                still_tied=ties(model.module) == tied
                and all(torch.equal(state[a], state[b]) for a, *more in tied for b in more),
                evaluates=torch.equal(evaluate(model, probe), evaluate(plain, probe)),
            )
    return found


def limits(name: str, stage: int, world: int) -> tuple[float, float, float]:
    """How far from one process, from torch's DDP and from ZeRO-2 a stage may be; 0 is bit for bit.

    Two numbers add up the same in any order; from three ranks on an all-reduce has an order of its
    own. One process on the whole batch adds samples, not ranks.
    """
    two = 0.0 if world <= 2 else CLOSE
    alone = two if world == 1 or not CASES[name].whole_batch else CLOSE
    return alone, two, 0.0 if stage > 0 else two


# One of each awkwardness; the rest repeats it in other models: tied parameters, recomputation, one
# block that runs twice, experts that a rank leaves out, batch statistics, frozen parts.
KINDS = [
    name
    for name in CASES
    if name.startswith(("GPT-2, dropout", "ALBERT", "T5", "Switch", "ResNet", "Whisper"))
]
FEW = [name for name in KINDS if name.startswith(("T5", "Switch"))]
EXTRA = pytest.mark.extra


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, KINDS, id="2"),
        pytest.param(3, FEW, id="3"),
        *(pytest.param(n, list(CASES), id=f"{n}, all", marks=EXTRA) for n in (1, 2, 3)),
        # from four ranks on two cores it is slow: only what differs most from other models
        pytest.param(4, [*FEW, "Mixtral"], id="4", marks=EXTRA),
    ],
)
def test_every_stage_trains_as_one_process_does(world, names):
    pytest.importorskip("transformers")
    run = dz.launch(train_all, world, args=(names,), record=False, timeout=400)
    assert all(len(found) == len(names) * len(STAGES) for found in run)
    for name, stage in run[0]:
        everyone = [found[name, stage] for found in run]
        where = f"{name}, stage {stage}: {everyone}"
        for got in everyone:
            distances = got.to_alone, got.to_torch, got.to_zero2
            bounds = zip(distances, limits(name, stage, world), strict=True)
            assert all(distance <= limit for distance, limit in bounds), where
            assert got.still_tied and got.evaluates, where
        for spread, sharded_from in (("held", 3), ("state", 1)):
            here = [getattr(got, spread)[0] for got in everyone]
            whole = getattr(everyone[0], spread)[1]
            if stage < sharded_from:
                assert here == [whole] * world, where
            else:  # every element lies on exactly one rank
                assert sum(here) == whole and max(here) < 1.25 * whole / world + 1, where
