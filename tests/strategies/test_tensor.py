"""Tensor parallelism: parts of layers, whole results, one all-reduce forward and one backward."""

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ddpz_lite as dz
from ddpz_lite.strategies.mesh import Cut, cuts_of
from ddpz_lite.strategies.tensor.layers import ColumnLinear, RowLinear

WIDTH, HEADS, T, B, LAYERS = 24, 12, 5, 2, 2
CONFIG = dz.GPTConfig(vocab_size=7, context=T, layers=LAYERS, heads=HEADS, width=WIDTH, tied=True)


def gpt() -> dz.GPT:
    torch.manual_seed(0)
    model = dz.GPT(CONFIG)
    for name, param in model.named_parameters():  # biases too must make a difference
        if name.endswith("bias"):
            nn.init.normal_(param)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(7, (B, T + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def local(name: str, full: Tensor, cuts: dict[str, Cut], like: Tensor) -> Tensor:
    return cuts[name].of(full, like.shape) if name in cuts else full


def against_one_process() -> dict[str, int]:
    full, model = gpt(), gpt()
    if dist.get_rank() > 0:
        nn.init.zeros_(model.tokens.weight)  # rank 0's weights win
    model = dz.tensor_parallel(model)
    cuts = cuts_of(model)
    x, y = batch()
    dz.next_token_loss(full(x), y).backward()
    logits = model(x)
    torch.testing.assert_close(logits, full(x))
    dz.next_token_loss(logits, y).backward()
    wanted = dict(full.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), local(name, wanted[name], cuts, param).detach())
        grad = local(name, wanted[name].grad, cuts, param)
        torch.testing.assert_close(param.grad, grad, rtol=1e-4, atol=1e-6)
    replicated = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if n not in cuts])
    everyone = [torch.empty_like(replicated) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, replicated)
    assert all(torch.equal(one, replicated) for one in everyone)  # so that they stay the same
    return {name: param.numel() for name, param in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_of_one_process_from_parts_of_layers(world):
    full = {name: param.numel() for name, param in gpt().named_parameters()}
    cut = re.compile(r".*(qkv|up)\.(weight|bias)|.*(out|down)\.weight")
    for held in dz.launch(against_one_process, world):
        assert held == {n: c // world if cut.match(n) else c for n, c in full.items()}


def against_torch() -> None:
    """The MLP of a block cut by torch and by us; torch cuts no qkv by heads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(2))

    def mlp() -> nn.Sequential:
        block = gpt().blocks[0]
        return nn.Sequential(block.up, nn.GELU(), block.down)

    theirs = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ours = mlp()
    ours[0], ours[2] = ColumnLinear(ours[0]), RowLinear(ours[2], mesh)
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    for model, given in zip((ours, theirs), inputs, strict=True):
        outputs.append(model(given))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(given.grad for given in inputs))
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        full, part = other.grad.full_tensor(), other.grad.to_local()
        other_grad = part if part.shape == own.shape else full
        torch.testing.assert_close(own.grad, other_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_gradients_as_torch_tensor_parallel(world):
    dz.launch(against_torch, world)


def forward_and_backward(learns: bool) -> None:
    model = dz.tensor_parallel(gpt())
    x, y = batch()
    with torch.set_grad_enabled(learns):
        loss = dz.next_token_loss(model(x), y)
    if learns:
        loss.backward()


def test_one_all_reduce_forward_and_one_backward_for_attention_and_for_mlp():
    counts = {}
    for learns in (False, True):
        run = dz.launch(forward_and_backward, 2, args=(learns,))
        sums = [r for r in run.ledger if r.op == "all_reduce"]
        counts[learns] = Counter(r.rank for r in sums)
        assert {r.elements for r in sums} == {B * T * WIDTH}
        assert {r.op for r in run.ledger} == {"all_reduce", "broadcast"}  # of weights, at the start
    assert counts[False] == {0: 2 * LAYERS, 1: 2 * LAYERS}
    assert counts[True] == {0: 4 * LAYERS, 1: 4 * LAYERS}


@pytest.mark.parametrize(
    "cut", [Cut((12, 5), 1, 3, 1), Cut((12, 5), 2, 3, 2), Cut((4, 6), 4, 3, 0)]
)
def test_a_cut_knows_its_elements_in_the_whole(cut):
    full = torch.arange(60 if cut.shape == (12, 5) else 24).view(cut.shape)
    parts = [Cut(cut.shape, cut.outer, 3, t).of(full, (-1,)) for t in range(3)]
    assert torch.equal(cut.join(parts), full)
    own = parts[cut.part]
    for start, stop in ((0, own.numel()), (3, 7), (5, 5)):
        spans = cut.spans(start, stop)
        found = [full.flatten()[a : a + n] for a, n in spans]
        assert torch.equal(torch.cat([own[:0], *found]), own[start:stop])


def refused(what: str) -> None:
    config: dict[str, Any] = {"vocab_size": 7, "context": 4, "layers": 1, "heads": 4, "width": 8}
    if what == "heads":
        config["heads"] = 1
    with torch.device("meta" if what == "meta" else "cpu"):
        model = dz.GPT(dz.GPTConfig(**config))
    model = dz.tensor_parallel(copy.deepcopy(model))
    dz.parallelize(model, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("heads", "1 heads do not divide into 2 ranks"),
        ("meta", "not one on the meta device"),
        ("averaged", "no mesh with an axis 'tensor'"),
    ],
)
def test_wrong_use_is_refused_in_words(what, words):
    with pytest.raises(dz.RankFailed, match=re.escape(words)):
        dz.launch(refused, 2, args=(what,))


def not_cut(what: str) -> None:
    layer: nn.Linear = nn.Linear(8, 8)
    if what == "forward hook":
        layer.register_forward_hook(lambda *_: None)
    elif what == "gradient hook":
        layer.weight.register_hook(lambda grad: 2 * grad)
    elif what == "weight_norm":
        layer = nn.utils.parametrizations.weight_norm(layer)
    elif what == "own forward":
        layer = nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)
        layer.__class__ = type("Lora", (nn.Linear,), {"forward": lambda self, x: x})
    ColumnLinear(layer, blocks=3 if what == "blocks" else 1)
    if what == "twice":
        dz.tensor_parallel(dz.tensor_parallel(gpt()))
    if what == "in a GPT":
        model = gpt()
        model.blocks[1].down.register_forward_pre_hook(lambda *_: None)
        with pytest.raises(ValueError, match="hooks"):
            dz.tensor_parallel(model)
        assert not cuts_of(model)  # none of it was cut
        raise ValueError("as it was")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("forward hook", "the layer has hooks (_forward_hooks)"),
        ("gradient hook", "the layer has hooks (weight)"),
        ("weight_norm", "parameters besides weight and bias (weight_norm, a parametrization)"),
        ("own forward", "a forward of its own (Lora)"),
        ("blocks", "8 outputs do not divide into 3 blocks"),
        ("twice", "this GPT is cut already"),
        ("in a GPT", "as it was"),
    ],
)
def test_what_would_be_lost_by_cutting_is_refused(what, words):
    with pytest.raises(dz.RankFailed, match=re.escape(words)):
        dz.launch(not_cut, 2, args=(what,))
