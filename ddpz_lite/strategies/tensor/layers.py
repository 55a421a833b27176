"""Tensor parallelism: each rank holds some heads of attention and some columns of the MLP.

A pair of layers, the first cut by columns, the second by rows, needs one sum over ranks at its end:

    y = act(x A) B      rank t has A[:, t] and B[t]:  y = sum over t of act(x A[:, t]) B[t]

The activation works element by element, so it may come between; after a row-cut layer it may not,
because there each rank has only a part of a sum. So attention and MLP call one all-reduce forward
and one backward each, of the size of their input (f and g in `functions`). What is not cut
(norms, embeddings, head, the bias of a row-cut layer) is the same on all ranks, and so is its
gradient.

With sequence parallelism the layers between, norms and dropouts, have 1 / t of the tokens on each
rank, and so 1 / t of the activations. The all-reduce becomes a reduce-scatter and an all-gather,
which together send the same bytes; backward gathers the input of the column-cut layers again. With
n = B T C elements, elements sent by a rank for a block, forward and backward, times (t - 1) / t:

    tensor 8n      tensor and sequence 10n, and 12C for the gradients of norms and biases

In torch's convention a weight is (out, in): `ColumnLinear` cuts its rows, `RowLinear` its columns.

Sources: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, section 4.2.2.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddpz_lite.model import GPT, Attention, Block
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.mesh import Cut, mark
from ddpz_lite.strategies.parameters import show_parts
from ddpz_lite.strategies.tensor.functions import Add, Copy, GatherLinear, Scatter
from ddpz_lite.strategies.tensor.masks import draw_alike, draw_apart
from ddpz_lite.strategies.tensor.sequence import SequenceDropout, SequenceNorm
from ddpz_lite.strategies.tensor.vocabulary import VocabularyEmbedding

Group = dist.DeviceMesh | dist.ProcessGroup | Comm | None


class _CutLinear(nn.Linear):
    """This rank's part of a linear layer; `cuts` says which of its parameters are cut, and how.

    dim: the dimension of a parameter that is cut.
    """

    dim: int

    def __init__(
        self, linear: nn.Linear, comm: Comm, cuts: dict[str, Cut], sequence: bool = False
    ) -> None:
        nn.Module.__init__(self)
        check_layer(linear)
        self.comm, self.cuts, self.sequence = comm, cuts, sequence
        for name, param in linear.named_parameters():
            cut, local = cuts.get(name), param
            if cut is not None:
                shape = list(cut.shape)
                shape[self.dim] //= comm.world
                local = nn.Parameter(cut.of(param.detach(), shape), param.requires_grad)
            self.register_parameter(name, local)
        if linear.bias is None:
            self.register_parameter("bias", None)
        self.out_features, self.in_features = self.weight.shape
        self.train(linear.training)


class ColumnLinear(_CutLinear):
    """A linear layer of which each rank computes some outputs: (..., in) to (..., out / t).

    Args:
        linear: the unsharded layer, the same on all ranks; weight (out, in), bias (out) are cut.
        group: a process group or 1-D mesh; default: the world.
        blocks: how many matrices lie one above the other in `linear`, each of which is cut: 3 for
            the queries, keys and values of attention.
        sequence: each rank has some tokens of the input: (..., T / t, in) to (..., T, out / t).

    Raises ValueError if the blocks do not divide the outputs, or the ranks a block; for a layer
    with hooks, with weight normalisation, or with a forward of its own (see `check_layer`).
    """

    dim = 0

    def __init__(
        self, linear: nn.Linear, group: Group = None, blocks: int = 1, sequence: bool = False
    ) -> None:
        check_layer(linear)
        comm, (out, inside) = Comm.of(group), linear.weight.shape
        if blocks < 1 or out % blocks:
            raise ValueError(
                f"{out} outputs do not divide into {blocks} blocks. Fix: blocks=3 for a layer of "
                "queries, keys and values, 1 for others."
            )
        check_divides(out // blocks, comm, "outputs")
        where = {"outer": blocks, "parts": comm.world, "part": comm.rank}
        cuts = {"weight": Cut((out, inside), **where)}
        if linear.bias is not None:
            cuts["bias"] = Cut((out,), **where)
        super().__init__(linear, comm, cuts, sequence)

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            return GatherLinear.apply(x, self.weight, self.bias, self.comm)  # (..., T, out / t)
        return F.linear(Copy.apply(x, self.comm), self.weight, self.bias)  # (..., out / t)


class RowLinear(_CutLinear):
    """A linear layer of which each rank has some inputs: (..., in / t) to all of (..., out).

    `linear` and `group` as for `ColumnLinear`; sequence: each rank gets some tokens of the output,
    (..., T, in / t) to (..., T / t, out). The bias is unsharded and is added after the sum: each
    rank that added it before would add it once more. Raises ValueError if the ranks do not divide
    the inputs, and for layers as `ColumnLinear` does.
    """

    dim = 1

    def __init__(self, linear: nn.Linear, group: Group = None, sequence: bool = False) -> None:
        check_layer(linear)
        comm, (out, inside) = Comm.of(group), linear.weight.shape
        check_divides(inside, comm, "inputs")
        cuts = {"weight": Cut((out, inside), out, comm.world, comm.rank)}
        super().__init__(linear, comm, cuts, sequence)

    def forward(self, x: Tensor) -> Tensor:
        end = Scatter if self.sequence else Add
        y = end.apply(F.linear(x, self.weight), self.comm)  # (..., out), or (..., T / t, out)
        if self.bias is None:
            return y
        return y + (Copy.apply(self.bias, self.comm) if self.sequence else self.bias)


def tensor_parallel(
    gpt: GPT, group: Group = None, *, sequence: bool = False, vocabulary: bool = False
) -> GPT:
    """Cut attention and MLP of every block over the ranks of `group`, in place; returns the GPT.

    Rank 0's weights win. Every rank must be given the same batch. Norms of the gradient count what
    is not cut once, torch's too.

    Args:
        sequence: sequence parallelism; windows must have a multiple of t tokens. Norms and
            dropouts are replaced by ones that see (B, T / t, C); parameters keep their names.
        vocabulary: cut the rows of the token embedding and of the head too. The model then returns
            this rank's logits (B, T, V / t), for `vocabulary_loss`.

    Dropout masks agree where all ranks have the same activation, and differ where each has its own
    heads or tokens; see `masks`. All ranks of the group get one seed for that.

    Raises ValueError if the ranks do not divide the heads or the vocabulary, for a GPT on the meta
    device, for one that is cut already, and for layers that `check_layer` refuses.
    """
    comm = Comm.of(group)
    if comm.world == 1:
        return gpt
    _check_gpt(gpt, comm, vocabulary)
    comm.broadcast(list(gpt.parameters()))
    for block in (module for module in gpt.modules() if isinstance(module, Block)):
        attention = block.attention
        attention.heads = gpt.config.heads // comm.world
        attention.qkv = ColumnLinear(attention.qkv, comm, 3, sequence)
        attention.out = RowLinear(attention.out, comm, sequence)
        block.up = ColumnLinear(block.up, comm, sequence=sequence)
        block.down = RowLinear(block.down, comm, sequence)
        if sequence:
            block.norm1, block.norm2 = (SequenceNorm(n, comm) for n in (block.norm1, block.norm2))
    if sequence:
        gpt.norm = SequenceNorm(gpt.norm, comm, joins=not vocabulary)
        gpt.drop = SequenceDropout(gpt.drop.p, comm)
    if gpt.config.dropout:
        draw_alike(comm)
        for module in gpt.modules():
            if isinstance(module, Attention) or (sequence and isinstance(module, nn.Dropout)):
                draw_apart(module, comm)
    if vocabulary:
        gpt.tokens = VocabularyEmbedding(gpt.tokens, comm)
        gpt.head = ColumnLinear(gpt.head, comm, sequence=sequence)
        if gpt.config.tied:
            gpt.head.weight = gpt.tokens.weight
    cut = {id(m._parameters[n]) for m in gpt.modules() for n in getattr(m, "cuts", ())}
    for param in gpt.parameters():
        mark(param, elsewhere=comm.rank > 0 and id(param) not in cut)
    show_parts(gpt.parameters(), "tensor", comm)
    return gpt


def _check_gpt(gpt: GPT, comm: Comm, vocabulary: bool) -> None:
    """Raise ValueError for a GPT that cannot be cut, before any of it is."""
    if any(hasattr(module, "cuts") for module in gpt.modules()):
        raise ValueError(
            "this GPT is cut already: tensor_parallel was called before, and again would cut each "
            "part once more. Fix: call it once, on a GPT as it was built."
        )
    if any(p.is_meta for p in gpt.parameters()):
        raise ValueError("tensor_parallel needs a GPT with values, not one on the meta device")
    check_divides(gpt.config.heads, comm, "heads")
    if vocabulary:
        check_divides(gpt.config.vocab_size, comm, "tokens of the vocabulary")
    for name, module in gpt.named_modules():
        if isinstance(module, nn.Linear) and (name != "head" or vocabulary):
            check_layer(module, name)


def check_layer(linear: nn.Linear, name: str = "the layer") -> None:
    """Raise ValueError for a linear layer of which more than weight and bias would be lost."""
    has = [kind for kind in ("weight", "bias") if isinstance(getattr(linear, kind), nn.Parameter)]
    hooks = [name for name, of in vars(linear).items() if name.endswith("_hooks") and of]
    hooks += [n for n in has if getattr(linear, n)._backward_hooks]
    hooks += [n for n in has if getattr(linear, n)._post_accumulate_grad_hooks]
    what = None
    if [n for n, _ in linear.named_parameters()] != has:
        what = "parameters besides weight and bias (weight_norm, a parametrization)"
    elif hooks:
        what = f"hooks ({hooks[0]}), which would see a part of the output or gradient"
    elif type(linear).forward not in (nn.Linear.forward,):
        what = f"a forward of its own ({type(linear).__name__})"
    if what is not None:
        raise ValueError(
            f"{name} has {what}, so it cannot be cut. Fix: a plain nn.Linear; register hooks on "
            "the part, after it was cut."
        )


def check_divides(count: int, comm: Comm, what: str) -> None:
    """Raise ValueError if the ranks of `comm` do not divide the count."""
    if count % comm.world:
        raise ValueError(
            f"{count} {what} do not divide into {comm.world} ranks. Fix: a number of ranks that "
            f"divides {count}."
        )
