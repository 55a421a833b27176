"""What a rank of a mesh has of the whole model: parts of parameters, and some that others have too.

On a mesh data x pipe x tensor, the ranks along `data` hold the same part of the model, and the
strategies share its state between them. Along the other two, ranks hold different parts. Four
things follow, and here is what the rest of the library has to know of them:

    Cut          a layer that is cut over `tensor` has a range of its rows or columns
    counted      norms count each element once, though several ranks may hold it: norms and biases
                 next to layers that are cut, an embedding that two stages share
    apart        the same shared embedding lies in a flat buffer of its own, so that its shards are
                 the same on both stages and can be added
    experts      the parameters of an expert are shared by the ranks that have it, all others by all

The last three are marks on the parameter: `elsewhere`, `apart`, `experts`.

A rank of an interleaved pipeline has several parts of the model: `Chunks` makes one module of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from ddpz_lite.strategies.comm import Comm


@dataclass(frozen=True)
class Cut:
    """Part `part` of `parts` of a tensor that is cut along one dimension.

    shape: of the whole tensor. Laid flat and seen as (outer, parts, inner), a rank has
    [:, part]. So rows are cut with outer 1, columns with outer = the number of rows, and the three
    blocks of a qkv matrix, each cut by heads, with outer 3.
    """

    shape: tuple[int, ...]
    outer: int
    parts: int
    part: int

    @property
    def inner(self) -> int:
        return prod(self.shape) // (self.outer * self.parts)

    def of(self, whole: Tensor, shape: Sequence[int]) -> Tensor:
        """This rank's part of a whole tensor, in its local shape; a copy."""
        seen = whole.reshape(self.outer, self.parts, self.inner)
        return seen[:, self.part].reshape(shape).clone()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the parts of all ranks in order."""
        return torch.stack([p.reshape(self.outer, -1) for p in parts], 1).view(self.shape)

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Elements start to stop of the part, laid flat, as (start, length) in the whole."""
        found, inner = [], self.inner
        while start < stop:
            row, column = divmod(start, inner)
            length = min(stop - start, inner - column)
            found.append(((row * self.parts + self.part) * inner + column, length))
            start += length
        return found


def cuts_of(module: nn.Module) -> dict[str, Cut]:
    """{parameter name: its cut}, for the layers of `tensor` in the module; empty if it has none."""
    return {
        f"{path}.{name}".lstrip("."): cut
        for path, child in module.named_modules()
        for name, cut in getattr(child, "cuts", {}).items()
    }


def mark(param: nn.Parameter, like: nn.Parameter | None = None, **marks: Any) -> None:
    """Set `elsewhere`, `apart` or `experts`, where given; `like`: also what that parameter has."""
    for name in ("elsewhere", "apart", "experts"):
        if value := marks.get(name) or getattr(like, name, None):
            setattr(param, name, value)


def experts(param: nn.Parameter) -> Comm | None:
    """Of an expert's parameter, the ranks that have the same expert; None for all others."""
    return getattr(param, "experts", None)


def comm_for(param: nn.Parameter, comm: Comm) -> Comm:
    """The ranks that share the state of this parameter; `comm` is that of a model's other ones.

    Raises ValueError for experts in a model that is sharded over other ranks than all.
    """
    own = experts(param)
    if own is None or comm.size == 1:
        return comm
    if comm.copies > 1 or comm.size != own.size:
        raise ValueError(
            f"experts are distributed over {own.size} ranks, and the model is to be sharded over "
            f"{comm.world}, with {comm.copies} replicas: experts need all ranks in one group. Fix: "
            'parallelize(..., mesh=None), or a mesh with axes named "data" and "expert".'
        )
    return own


def by_comm(params: Iterable[nn.Parameter], comm: Comm) -> dict[Comm, list[nn.Parameter]]:
    """Parameters by the ranks that share their state, those of `comm` first."""
    found: dict[Comm, list[nn.Parameter]] = {comm: []}
    for param in params:
        found.setdefault(comm_for(param, comm), []).append(param)
    return found


def broadcast(params: Iterable[nn.Parameter], comm: Comm) -> None:
    """Give parameters the values of the first rank that shares their state, in place."""
    for own, some in by_comm(params, comm).items():
        own.broadcast(some)


def replicated(params: Iterable[nn.Parameter], comm: Comm) -> Comm:
    """This rank alone, with the axes along which other ranks have other parameters than these."""
    other = [own.axes for param in params if (own := experts(param)) is not None]
    return comm.alone(comm.axes | (other[0] if other else {}))


def counted(param: nn.Parameter, comm: Comm) -> bool:
    """Whether norms count the gradient of this parameter here, and not on another rank of `comm`.

    Where gradients are replicated, `comm` has the axis of the experts; the first rank along it
    counts all other parameters.
    """
    if "expert" in comm.axes and experts(param) is None:
        return dist.get_rank(comm.axes["expert"]) == 0
    return not (comm.axes and getattr(param, "elsewhere", False))


def apart(param: nn.Parameter) -> bool:
    """Whether the parameter lies in a flat buffer of its own."""
    return getattr(param, "apart", False)


class Chunks(nn.ModuleList):
    """The chunks of the model that one rank of an interleaved pipeline has, as one module.

    `chunks(c, *inputs)` calls chunk c. Parameters, buffers and modules have the names of their
    chunk, which are those of the whole model; so the rest of the library sees one part of the
    model, as it does on other meshes.
    """

    def forward(self, chunk: int, *inputs: Any) -> Any:
        return self[chunk](*inputs)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self in memo:
            return
        memo.add(self)
        yield prefix, self
        for chunk in self:
            yield from chunk.named_modules(memo, prefix, remove_duplicate)

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        for chunk in self:
            destination = chunk.state_dict(
                destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        return destination
