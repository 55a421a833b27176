"""Sequence and vocabulary parallelism: results of one process, bytes, saved activations, masks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_tensor import local
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard
from torch.utils.checkpoint import checkpoint

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.mesh import cuts_of
from ddpz_lite.strategies.pipeline.pipeline import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import one_f_one_b
from ddpz_lite.strategies.tensor.layers import ColumnLinear, RowLinear
from ddpz_lite.strategies.tensor.sequence import SequenceNorm
from ddpz_lite.strategies.tensor.vocabulary import vocabulary_loss

WIDTH, HEADS, T, B, LAYERS, V = 24, 12, 12, 2, 2, 36
KINDS = [
    {"sequence": sequence, "vocabulary": vocabulary}
    for sequence in (False, True)
    for vocabulary in (False, True)
]


def gpt(tied: bool = True, **options: Any) -> dz.GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "context": T, "layers": LAYERS, "heads": HEADS, "width": WIDTH}
    model = dz.GPT(dz.GPTConfig(tied=tied, **sizes | options))
    for name, param in model.named_parameters():  # biases and norms must make a difference
        if param.dim() == 1:
            nn.init.normal_(param, 1.0 if "norm" in name and "weight" in name else 0.0)
    return model


def batch(rows: int = B) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(V, (rows, T + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, vocabulary: bool) -> Tensor:
    return (vocabulary_loss if vocabulary else dz.next_token_loss)(model(x), y)


def against_one_process() -> None:
    x, y = batch()
    for kind in KINDS:
        for tied in (True, False):
            full, model = gpt(tied), dz.tensor_parallel(gpt(tied), **kind)
            cuts, right = cuts_of(model), dz.next_token_loss(full(x), y)
            right.backward()
            loss = loss_of(model, x, y, kind["vocabulary"])
            loss.backward()
            torch.testing.assert_close(loss, right)
            wanted = dict(full.named_parameters())
            assert wanted.keys() == dict(model.named_parameters()).keys()
            for name, param in model.named_parameters():
                grad = local(name, wanted[name].grad, cuts, param)
                torch.testing.assert_close(param.grad, grad, rtol=1e-4, atol=1e-6, msg=name)
                everyone = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, param.grad)
                assert name in cuts or all(torch.equal(one, param.grad) for one in everyone)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_of_one_process(world):
    dz.launch(against_one_process, world)


def losses() -> None:
    """Targets that count nothing, sums, and logits in half precision."""
    comm, generator = Comm(), torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, V, generator=generator).mul_(20).requires_grad_()
    targets = torch.randint(V, (3, 5), generator=generator)
    targets[0, :3] = -100
    part = logits.detach().chunk(comm.world, -1)[comm.rank].clone().requires_grad_()
    for reduction in ("mean", "sum"):
        want = nn.functional.cross_entropy(logits.mT, targets, reduction=reduction)
        got = vocabulary_loss(part, targets, None, reduction)
        torch.testing.assert_close(got, want)
        logits.grad = part.grad = None
        want.backward()
        got.backward()
        torch.testing.assert_close(part.grad, logits.grad.chunk(comm.world, -1)[comm.rank])
    half = part.detach().bfloat16().requires_grad_()
    vocabulary_loss(half, targets).backward()
    assert half.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"logits .* need targets"):
        vocabulary_loss(part, targets[0])


@pytest.mark.parametrize("world", [2, 3])
def test_cross_entropy_of_logits_in_parts(world):
    dz.launch(losses, world)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def against_torch() -> None:
    world = dist.get_world_size()
    mesh, comm = init_device_mesh("cpu", (world,)), Comm()
    x = torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(2))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    theirs, ours = parallelize_module(Layers(), mesh, plan), Layers()
    ours.norm = SequenceNorm(ours.norm, comm)
    ours.up, ours.down = (
        ColumnLinear(ours.up, sequence=True),
        RowLinear(ours.down, sequence=True),
    )
    part = x.chunk(world, 1)[comm.rank]
    outputs = [model(part).to_local() if model is theirs and hasattr(model(part), "to_local")
               else model(part) for model in (ours, theirs)]  # fmt: skip
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for (name, param), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        grad = other.grad
        is_part = param.shape == grad.to_local().shape
        if is_part and not any(placement.is_partial() for placement in grad.placements):
            want = grad.to_local()
        else:
            want = grad.full_tensor()
        torch.testing.assert_close(param.grad, want, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_as_torch_sequence_parallel(world):
    dz.launch(against_torch, world)


# ---- bytes, activations


def forward_and_backward(kind: dict[str, bool], layers: int, tokens: int = V) -> int:
    """Returns the bytes that forward saves for backward, parameters aside."""
    model = dz.tensor_parallel(gpt(False, layers=layers, vocab_size=tokens), **kind)
    kept = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, y = batch()
    with dz.span("step"):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, x, y, kind["vocabulary"])
        loss.backward()
    return sum(saved.values())


def sent_in_step(run: dz.Run) -> list[int]:
    """Bytes of each rank."""
    found: dict[int, int] = defaultdict(int)
    spans = {s.rank: s for s in run.spans if s.name == "step"}
    for r in run.ledger:
        if spans[r.rank].started <= r.started <= spans[r.rank].finished:
            found[r.rank] += r.bytes_sent
    return [found[rank] for rank in sorted(found)]


def of_one_block(world: int, kind: dict[str, bool]) -> tuple[int, int]:
    """(bytes sent by a rank, bytes saved by it) of one block: two blocks, less one."""
    runs = [dz.launch(forward_and_backward, world, args=(kind, n)) for n in (1, 2)]
    sent = [sum(sent_in_step(run)) / world for run in runs]
    return round(sent[1] - sent[0]), runs[1][0] - runs[0][0]


@pytest.mark.parametrize("world", [2, 4])
def test_a_block_sends_and_keeps_what_the_formulas_say(world):
    n, c, share = B * T * WIDTH * 4, WIDTH * 4, (world - 1) / world  # bytes
    plain, kept = of_one_block(world, {"sequence": False, "vocabulary": False})
    cut, fewer = of_one_block(world, {"sequence": True, "vocabulary": False})
    assert plain == round(8 * n * share)
    assert cut == round((10 * n + 12 * c) * share)
    # Of the two norms, input, output and statistics have 1 / t of the tokens; but their weights and
    # biases, stacked for one message, are kept once more. What lies inside attention and MLP, 13 n
    # and the sums of softmax, is cut in both.
    statistics = 4 * B * T * 4
    assert kept - fewer == round((4 * n + statistics) * share - 4 * c)


def test_a_vocabulary_in_parts_keeps_and_sends_less():
    world, tokens = 4, 4096
    runs = [
        dz.launch(forward_and_backward, world, args=(kind, 1, tokens))
        for kind in ({"sequence": False, "vocabulary": v} for v in (False, True))
    ]
    logits = B * T * tokens * 4
    assert runs[0][0] - runs[1][0] > 0.7 * logits
    assert max(sent_in_step(runs[1])) - max(sent_in_step(runs[0])) < 0.1 * logits


# ---- masks


def masks(kind: dict[str, bool]) -> dict[str, Any]:
    """What each dropout of a step has drawn here."""
    torch.manual_seed(dist.get_rank())  # as a script may
    model = dz.tensor_parallel(gpt(dropout=0.5), **kind)
    found: dict[str, Any] = {}

    def see(name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Tensor) -> None:
            found.setdefault(name, output == 0)

        return hook

    for name, module in model.named_modules():
        if name.endswith("drop"):
            module.register_forward_hook(see(name))
    seen = []
    attend = nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        state = torch.get_rng_state()
        seen.append(torch.rand(4))
        torch.set_rng_state(state)
        return attend(q, k, v, **options)

    nn.functional.scaled_dot_product_attention = spy
    try:
        x, y = batch()
        loss_of(model, x, y, kind["vocabulary"]).backward()
    finally:
        nn.functional.scaled_dot_product_attention = attend
    found["attention"] = seen[0]
    found["gradients"] = {n: p.grad for n, p in model.named_parameters() if n not in cuts_of(model)}
    found["after"] = torch.get_rng_state()
    return found


@pytest.mark.parametrize("kind", KINDS[::2])
def test_masks_agree_where_activations_do_and_differ_where_they_differ(kind):
    first, second = dz.launch(masks, 2, args=(kind,))
    assert torch.equal(first["after"], second["after"])  # so they stay in step
    assert not torch.equal(first["attention"], second["attention"])
    for name in ("drop", "blocks.0.drop"):
        assert torch.equal(first[name], second[name]) != kind["sequence"], name
    for name, grad in first["gradients"].items():  # so that they stay the same
        assert torch.equal(grad, second["gradients"][name]), name


def recomputed() -> None:
    """A checkpoint draws the same masks again."""
    grads = []
    for wrap in (False, True):
        torch.manual_seed(1)
        model = dz.tensor_parallel(gpt(dropout=0.5), sequence=True)
        torch.manual_seed(2)
        if wrap:
            for block in model.blocks:
                forward = block.forward
                block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
        x, y = batch()
        dz.next_token_loss(model(x), y).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(*grads)


def test_recomputation_draws_the_same_masks():
    dz.launch(recomputed, 2)


# ---- with the rest


def on_a_mesh(kind: dict[str, bool], stage: int) -> tuple[dict[str, Tensor], list[float]]:
    """Two updates on data x pipe x tensor."""
    axes = ("data", "pipe", "tensor")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=axes)
    model = dz.tensor_parallel(gpt(), mesh["tensor"], **kind)
    pipe = dz.Pipeline(gpt_stages(model, 2), one_f_one_b(2, 2), mesh["pipe"])
    pipe, optimizer = dz.parallelize(pipe, torch.optim.AdamW, stage, mesh=mesh, lr=0.01, eps=1e-3)
    loss_fn: Any = dz.next_token_loss
    if kind["vocabulary"]:
        group = mesh["tensor"].get_group()
        loss_fn = lambda logits, y: vocabulary_loss(logits, y, group)  # noqa: E731
    norms = []
    for _ in range(2):
        pipe.step(*batch(4), loss_fn)
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return dz.full_state_dict(pipe), norms


@pytest.mark.parametrize("stage", [0, 3])
def test_with_a_pipeline_and_zero(stage):
    model, norms = gpt(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for _ in range(2):
        x, y = batch(4)
        dz.next_token_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    for kind in KINDS[1:]:
        for state, found in dz.launch(on_a_mesh, 4, args=(kind, stage)):
            assert found == pytest.approx(norms, rel=1e-4)
            torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-4, atol=1e-4)


def odd_window() -> None:
    dz.tensor_parallel(gpt(), sequence=True)(batch()[0][:, :5])


def test_a_window_that_does_not_divide_is_refused():
    with pytest.raises(dz.RankFailed, match="5 tokens do not divide into 2 ranks"):
        dz.launch(odd_window, 2)
