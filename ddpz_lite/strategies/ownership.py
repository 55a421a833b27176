"""Ownership by whole parameters, for optimizers that need whole matrices: Muon, Adafactor, Shampoo.

ZeRO-1 and ZeRO-2 usually cut a flat buffer anywhere, which is fine for an optimizer that works
element by element. Muon orthogonalises matrices, so a part of one is useless to it. Here each
parameter lies inside one slice of its buffer, whose rank owns it whole: the largest first, each to
the rank that owns the least so far. The transitions stay the same:

    elements   rank 0      rank 1      rank 2
    anywhere   aaaaaaaa    aabbbbbc    ccccdd..
    whole      aaaaaaaaaa  bbbbbdd...  ccccc.....     (. is padding)

[Note: padding] Slices are equal, as long as that of the rank that owns most, so padding is sent
too. A buffer therefore takes in further parameters, beyond `bucket_mb`, until padding is at most an
eighth of it, or there are no more. A matrix larger than an N-th of all of them still costs N times
its own size. Padding is never part of the optimizer's state.

Sources: Rajbhandari et al. 2020, section 5.1, and lesson 09, for the greedy cut; Liu et al., "Muon
is Scalable for LLM Training", 2025, section 2.3, for Muon with ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.guards.elementwise import check_elementwise, check_parameterwise
from ddpz_lite.strategies.layout import Layout
from ddpz_lite.strategies.per_group import class_of_group
from ddpz_lite.strategies.reducer import buckets_of, kind_of

# Known to need whole matrices: chosen without asking. Muon is new in torch 2.9.
NEED_WHOLE = tuple(
    getattr(torch.optim, name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name)
)


class WholeLayout(Layout):
    """Each tensor lies in one of the slices; `split` gives tensors in their own shapes."""

    @cached_property
    def _placed(self) -> tuple[list[tuple[int, int]], int]:
        """(owner, start in its slice) of each tensor, and how much the fullest slice holds."""
        loads, placed = [0] * self.world, [(0, 0)] * len(self.shapes)
        sizes = [prod(shape) for shape in self.shapes]
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            owner = loads.index(min(loads))
            placed[index] = owner, loads[owner]
            loads[owner] += sizes[index]
        return placed, max(loads)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        placed, width = self._placed
        starts = [owner * width + start for owner, start in placed]
        return [(at, at + prod(shape)) for at, shape in zip(starts, self.shapes, strict=True)]

    @property
    def shard_numel(self) -> int:
        return self._placed[1]

    def split(self, shard: Tensor) -> tuple[Tensor, ...]:
        """shard (shard_numel,) or longer: a view per tensor in its shape; (0,) of others' ones."""
        return tuple(
            shard[start : start + prod(shape)].view(shape) if owner == self.rank else shard[:0]
            for (owner, start), shape in zip(self._placed[0], self.shapes, strict=True)
        )


def laid_out(
    params: Sequence[nn.Parameter], whole: Collection[nn.Parameter], bucket_mb: float, world: int
) -> list[tuple[list[nn.Parameter], type[Layout]]]:
    """Buckets of trainable parameters and how they lie there; those in `whole` have owners."""
    cut = buckets_of([p for p in params if p not in whole], bucket_mb)
    owned = balanced(buckets_of([p for p in params if p in whole], bucket_mb), world)
    return [(b, Layout) for b in cut] + [(b, WholeLayout) for b in owned]


def balanced(buckets: Sequence[list[nn.Parameter]], world: int) -> list[list[nn.Parameter]]:
    """Buckets joined with the following ones until padding is at most an eighth of each.

    What is left at the end joins the bucket before it. Only parameters of one kind are joined.
    """
    done: list[list[nn.Parameter]] = []
    last: dict[Any, list[nn.Parameter]] = {}  # by kind
    for bucket in buckets:
        kind = kind_of(bucket[0])
        if kind in last and not _is_balanced(last[kind], world):
            last[kind] += bucket
        else:
            last[kind] = list(bucket)
            done.append(last[kind])
    for kind, rest in last.items():
        same = [b for b in done if kind_of(b[0]) == kind and b is not rest]
        if same and not _is_balanced(rest, world):
            same[-1] += rest
            done = [b for b in done if b is not rest]
    return done


def _is_balanced(bucket: Sequence[nn.Parameter], world: int) -> bool:
    layout = WholeLayout(tuple(p.shape for p in bucket), world, 0)
    return 8 * (layout.padded - layout.numel) <= layout.padded


def whole_groups(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    ownership: str | None,
    cuts: bool,
    may_own: bool,
    axes: Collection[str] = (),
) -> list[bool]:
    """Which groups have an optimizer that needs whole parameters.

    ownership: "parameter" for all groups; None: for those of Muon and Adafactor. cuts: False at
    stage 0, which takes any optimizer. may_own: whether this stage can give a rank whole
    parameters. axes: the other axes of the mesh. Raises TypeError or ValueError for an optimizer
    that would step wrongly.
    """
    if ownership not in (None, "parameter"):
        raise ValueError(
            f'ownership={ownership!r}: expected None, or "parameter" for an optimizer that needs '
            "whole matrices."
        )
    found, tried = [], set()
    for index, group in enumerate(groups):
        kind = class_of_group(optimizer_class, index)
        whole = ownership == "parameter" or needs_whole(kind)
        if whole:
            _check_whole(kind, group["params"], may_own or not cuts, axes)
        found.append(whole and cuts)
        if cuts and (kind, whole) not in tried:
            tried.add((kind, whole))
            device = next((p.device for p in group["params"]), "cpu")  # none on a frozen stage
            (check_parameterwise if whole else check_elementwise)(kind, options, device)
    return found


def needs_whole(kind: Any) -> bool:
    """Whether this optimizer class is known to need whole parameters."""
    while isinstance(kind, partial):
        kind = kind.func
    return isinstance(kind, type) and issubclass(kind, NEED_WHOLE)


def _check_whole(
    kind: Any, params: Sequence[nn.Parameter], may_own: bool, axes: Collection[str]
) -> None:
    name = getattr(kind, "__name__", str(kind))
    if not may_own:
        raise TypeError(
            f"{name} needs whole parameters, and stage 3 cuts each one over the ranks. Fix: "
            "stage=2, where every parameter has one owner; or an optimizer that works element by "
            "element."
        )
    if "tensor" in axes:
        raise TypeError(
            f"{name} needs whole parameters, and tensor_parallel has cut some over the axis "
            '"tensor". Fix: a mesh without that axis; or an optimizer that works element by '
            "element."
        )
    matrices_only = name == "Muon" and needs_whole(kind)
    other = next((p for p in params if matrices_only and p.ndim != 2), None)
    if other is not None:
        raise ValueError(
            f"Muon takes matrices only, and got a parameter of shape {tuple(other.shape)}. Fix: "
            "optimizer_class=dz.per_group(torch.optim.Muon, torch.optim.AdamW) with two groups, "
            "the matrices of the blocks first."
        )
