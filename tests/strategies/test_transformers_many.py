"""Many architectures of the `transformers` package, tiny and with random weights, at every stage.

`test_transformers.py` looks closely at a few. Here it is breadth that counts: what modules call,
read, share, return and leave out. A model trains on the sum of the squares of all it returns, so
each needs no more than a configuration and inputs; and it must equal one process bit for bit, for
two ranks have no order to add in. (But for numbers too small for a mantissa: halves of them round.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_jobs import distance
from torch import Tensor, nn

import ddpz_lite as dz

pytestmark = pytest.mark.rest

WORLD, STEPS, STAGES = 2, 2, (0, 1, 2, 3)
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
Batch = dict[str, Any]

# Every configuration takes of this what it knows.
TINY = {
    **dict.fromkeys(("vocab_size",), 50),
    **dict.fromkeys(("hidden_size", "embedding_size", "d_model", "image_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "head_dim", "d_kv", "rotary_dim"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "patch_size"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "state_size"), 4),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),  # skips layers by rank
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "num_channels": 3,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def ids(samples: int, length: int = 7) -> Tensor:
    return torch.randint(3, 50, (samples, length))


def text(samples: int) -> Batch:
    return {"input_ids": ids(samples)}


def pair(samples: int) -> Batch:
    return {"input_ids": ids(samples), "decoder_input_ids": ids(samples, 5)}


def picture(samples: int) -> Batch:
    return {"pixel_values": torch.randn(samples, 3, 16, 16)}


def large_picture(samples: int) -> Batch:
    return {"pixel_values": torch.randn(samples, 3, 64, 64)}


def points(samples: int) -> Batch:
    return picture(samples) | {"input_points": 16 * torch.rand(samples, 1, 2, 2)}


PYRAMID = {"hidden_sizes": [8, 16], "depths": [1, 2]}
SAM_VISION = TINY | {"output_channels": 16, "num_pos_feats": 8, "window_size": 2}
SAM_VISION |= {"global_attn_indexes": [1]}
SAM_PROMPT = {"hidden_size": 16, "image_size": 16, "patch_size": 4, "mask_input_channels": 4}
SAM_MASK = {"hidden_size": 16, "mlp_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SAM_MASK |= {"iou_head_hidden_dim": 16}
RESNET = PYRAMID | {"embedding_size": 8, "layer_type": "basic"}
SWIN = {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2}
SWIN |= {"image_size": 16, "patch_size": 4}
STAGED = {"num_encoder_blocks": 2, "depths": [1, 2], "hidden_sizes": [8, 16]}
PVT = STAGED | {"image_size": 64, "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
PVT |= {"sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2]}
POOL = STAGED | {"patch_sizes": [3, 3], "strides": [4, 2], "padding": [1, 1], "mlp_ratio": 2.0}

REFORMER = {"vocab_size": 50, "hidden_size": 16, "attention_head_size": 8, "num_attention_heads": 2}
REFORMER |= {"feed_forward_size": 24, "axial_pos_embds": False, "max_position_embeddings": 16}
REFORMER |= {"attn_layers": ["local", "lsh"], "num_buckets": 2, "num_hashes": 1, "hash_seed": 1}
REFORMER |= {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "is_decoder": False}
REFORMER |= {f"{of}_dropout_prob": 0.0 for of in ("hidden", "local_attention_probs")}
REFORMER |= {"lsh_attention_probs_dropout_prob": 0.0}

# What a configuration needs besides TINY (None: without it), and those that need nothing of TINY.
MORE: dict[str, dict[str, Any]] = {
    "Funnel": {"block_sizes": [1, 2], "num_decoder_layers": 2, "n_head": 4, "d_head": 4}
    | {"num_hidden_layers": None, "d_inner": 24},
    "Qwen2Moe": {"shared_expert_intermediate_size": 8},
    "DistilBert": {"hidden_dim": 24},
}
WHOLE: dict[str, dict[str, Any]] = {
    "Pvt": PVT,
    "PoolFormer": POOL,
    "ResNet": RESNET,
    "Swin": SWIN,
    "ConvNext": PYRAMID | {"num_stages": 2},
    "Reformer": REFORMER,
    "Sam": {
        "vision_config": SAM_VISION,
        "prompt_encoder_config": SAM_PROMPT,
        "mask_decoder_config": SAM_MASK,
    },
}

# Seven that once failed; then decoders and encoders, recurrent ones, experts, pairs, pictures.
ONCE: dict[str, Callable[[int], Batch]] = {
    "Funnel": text,
    "Jamba": text,
    "SqueezeBert": text,
    "Pvt": large_picture,
    "PoolFormer": large_picture,
    "Sam": points,
    "Reformer": lambda samples: {"input_ids": ids(samples, 8)},  # backwards inside a backward
}
TEXTS = (
    "Albert Bloom Bert Cohere ConvBert Deberta DebertaV2 DistilBert Electra Ernie Esm FNet "
    "Gemma Gemma2 GPT2 GPTBigCode GPTNeoX GPTJ Granite Llama Mistral MPNet Mpt Nystromformer Olmo "
    "Olmo2 OPT Persimmon Phi Phi3 Qwen2 Qwen3 RemBert Roberta RoFormer StableLm Starcoder2 XGLM XLM"
)
RECURRENT = "Mamba FalconMamba Rwkv xLSTM RecurrentGemma Lfm2"
EXPERTS = "Mixtral Qwen2Moe Qwen3Moe GraniteMoe"
PAIRS = "Bart Blenderbot M2M100 Marian MBart MT5 Pegasus PLBart T5 LongT5 UMT5 SwitchTransformers"
PICTURES = "Beit Data2VecVision DeiT Dinov2 ViT ViTMSN ResNet Swin ConvNext"
GROUPS = {
    "once failed": ONCE,
    "text": dict.fromkeys(TEXTS.split(), text),
    "recurrent, experts": dict.fromkeys([*RECURRENT.split(), *EXPERTS.split()], text),
    "encoder and decoder": dict.fromkeys(PAIRS.split(), pair),
    "vision": dict.fromkeys(PICTURES.split(), picture),
}


def build(name: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, f"{name}Model")
    kind = cls.config_class
    known = {k: v for k, v in TINY.items() if hasattr(kind, k) or hasattr(kind(), k)}
    options = {k: v for k, v in (known | MORE.get(name, {})).items() if v is not None}
    torch.manual_seed(3)
    return cls(kind(**WHOLE.get(name, options))).train()


def loss_of(model: nn.Module, batch: Batch, seed: int) -> Tensor:
    torch.manual_seed(seed)  # dropout
    output = model(**batch)
    values = output.values() if isinstance(output, dict) else output
    found = [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]
    return sum(t.square().mean() for t in found)


def batches(inputs: Callable[[int], Batch]) -> list[Batch]:
    """One for each rank in each step."""
    torch.manual_seed(7)
    return [inputs(2) for _ in range(STEPS * WORLD)]


def alone(name: str, inputs: Callable[[int], Batch]) -> dict[str, Tensor]:
    """One process, which takes the batches of the ranks one by one; rank 0's buffers stay."""
    model, data = build(name), batches(inputs)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    for step in range(STEPS):
        before = [b.clone() for b in model.buffers()]
        for rank in reversed(range(WORLD)):
            for buffer, start in zip(model.buffers(), before, strict=True):
                buffer.copy_(start)
            at = step * WORLD + rank
            (loss_of(model, data[at], at) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


def ours(name: str, inputs: Callable[[int], Batch], stage: int) -> tuple[dict[str, Tensor], Any]:
    model, optimizer = dz.parallelize(
        build(name), torch.optim.AdamW, stage, bucket_mb=0.016, **ADAMW
    )
    data = batches(inputs)
    for step in range(STEPS):
        at = step * WORLD + dist.get_rank()
        loss_of(model, data[at], at).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dz.full_state_dict(model), model


def train_all(cases: dict[str, Callable[[int], Batch]]) -> dict[str, str]:
    """What is wrong, by model and stage."""
    torch.set_num_threads(1)
    wrong = {}
    for name, inputs in cases.items():
        one = alone(name, inputs)
        for stage in STAGES:
            state, model = ours(name, inputs, stage)
            if not (gap := distance(state, one)) < 1e-37:
                wrong[f"{name}, stage {stage}"] = f"{gap} from one process"
        if len(model.units) < 2:
            wrong[name] = "it is one unit"
    return wrong


SHORT = {name: ONCE[name] for name in ("SqueezeBert", "Jamba", "Pvt", "Reformer")}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SHORT, id="a few"),
        *(pytest.param(g, id=name, marks=pytest.mark.extra) for name, g in GROUPS.items()),
    ],
)
def test_every_stage_trains_as_one_process_does(cases):
    pytest.importorskip("transformers")
    run = dz.launch(train_all, WORLD, args=(cases,), record=False, timeout=280)
    assert list(run) == [{}] * WORLD
