"""Which ranks hold a model together: the process groups of a strategy, made from a mesh or a group.

`Group` knows this rank's place and lets ranks agree on small things; `comm.Comm` adds the
transitions.

[Note: the world is not held] A script may end with its model alive. If the model held the world
group, `destroy_process_group` could not end gloo's threads, and one that releases a tensor while
Python shuts down aborts the process. So the world is None here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

# Axes of a mesh along which gradients are summed, and ZeRO may shard: the ranks have other samples,
# or other tokens of the same ones. Along all other axes they have other parts of the model; along
# "expert" they have other samples and other experts (`Group.of_experts`).
SUMMED = ("data", "expert", "context")


class Group:
    """This rank's place among the ranks that hold a model together; on a mesh, in two groups.

    Args:
        group: the process group that shards. None: the world, or this process alone if
            `torch.distributed` was not initialised.
        replicas: on a mesh, the group of the ranks that hold the same shard.
        cut: whether the replicas cut that shard among themselves (ZeRO-1 outside), or each keeps
            all of it (DDP).
        holders: the group of all ranks of the mesh, if they cut; None for the world.
        axes: on a mesh with other axes, the groups of the ranks that hold other parts of the model,
            by the name of the axis.
        size: the ranks over whose losses a gradient is a mean, if they are more than those that
            hold the parameter: see `of_experts`.

    Attributes: `rank` and `world` are those of the sharding group; `copies` is the number of ranks
    that hold the same shard, and `size` counts them too; `group` is None for the world. `across` is
    a Comm of the replicas if they cut the shard, else of this rank alone; so
    `across.shard(shard(full))` is what the optimizer steps on here. It is the `place`-th of
    `shards` equal slices, of which the ranks of `holders` have one each.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        cut: bool = False,
        holders: dist.ProcessGroup | None = None,
        axes: Mapping[str, dist.ProcessGroup] | None = None,
        size: int | None = None,
    ) -> None:
        if not dist.is_initialized():
            _refuse_forgotten_init()
        elif group is dist.group.WORLD:
            group = None
        self.group, self.replicas, self.axes = group, replicas, _not_the_world(axes or {})
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.copies = dist.get_world_size(replicas) if replicas is not None else 1
        self.size = self.world * self.copies if size is None else size
        self.across = type(self)(replicas) if cut else self.alone()
        self.holders = holders if cut else self.group
        self._place()

    def _place(self) -> None:
        self.shards = self.world * self.across.world
        self.place = self.rank * self.across.world + self.across.rank

    @classmethod
    def alone(cls, axes: Mapping[str, dist.ProcessGroup] | None = None) -> Self:
        """A group of one: every transition is the identity and no collective is called."""
        comm = cls.__new__(cls)
        comm.group, comm.replicas, comm.rank = None, None, 0
        comm.world, comm.copies, comm.size = 1, 1, 1
        comm.across, comm.holders, comm.axes = comm, None, _not_the_world(axes or {})
        comm._place()
        return comm

    @classmethod
    def of(
        cls, mesh: dist.DeviceMesh | dist.ProcessGroup | Group | None, cut: bool | None = None
    ) -> Self:
        """From a 2-D mesh (replicate, shard), a 1-D mesh (shard), a process group, or None.

        Of a mesh with an axis named "data", that one shards, together with "context", if there is
        one (see `SUMMED`), and the others are `axes`. cut:
        whether replicas cut their shard among themselves; needs a mesh (replicate, shard) unless
        None.
        """
        axes = 1 if mesh is None or isinstance(mesh, dist.ProcessGroup | Group) else mesh.ndim
        named = axes > 1 and "data" in (mesh.mesh_dim_names or ())
        if (axes > 2 and not named) or (cut is not None and (named or axes != 2)):
            wanted = "1 dimension (shard) or 2" if cut is None else "2 dimensions, a stage for each"
            raise ValueError(
                f"expected a mesh of {wanted} (replicate, shard), got {axes}. "
                "Fix: init_device_mesh(device, (replicas, shards)); with other axes, "
                'mesh_dim_names, one of them "data".'
            )
        if isinstance(mesh, Group):
            return mesh
        if mesh is None or isinstance(mesh, dist.ProcessGroup):
            return cls(mesh)
        if axes == 1:
            return cls(mesh.get_group())
        if named:
            return cls._on_axes(mesh)
        holders = _ranks_of(mesh) if cut else None
        return cls(mesh.get_group(1), mesh.get_group(0), bool(cut), holders)

    def part(self, size: int) -> Self:
        """This rank with its neighbours: the sharding group, cut into groups of `size` ranks."""
        ranks, first = dist.get_process_group_ranks(self.group), self.rank - self.rank % size
        return type(self)(
            dist.new_group(ranks[first : first + size], use_local_synchronization=True)
        )

    @classmethod
    def _on_axes(cls, mesh: dist.DeviceMesh) -> Self:
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"a mesh of {mesh.size()} ranks in a world of {dist.get_world_size()}: with other "
                "axes than data a mesh has all ranks. Fix: one mesh for the world."
            )
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        summed = tuple(name for name in sizes if name in SUMMED and sizes[name] > 1) or ("data",)
        others = [name for name, size in sizes.items() if name not in SUMMED and size > 1]
        return cls(group_along(mesh, summed), axes={name: mesh.get_group(name) for name in others})

    @classmethod
    def of_experts(
        cls, mesh: dist.DeviceMesh | dist.ProcessGroup | Group | None
    ) -> tuple[Self, Self]:
        """The ranks that exchange tokens, with their replicas, and those with this rank's experts.

        Of the second, `size` is the number of all ranks that exchange tokens: a gradient is the sum
        over the tokens of a whole group already. mesh: 2-D (replicas, ranks of a group), or one
        with an axis named "expert"; None, or what has one dimension, is one group.
        """
        names = getattr(mesh, "mesh_dim_names", None) or ()
        if "expert" not in names:
            tokens, others = cls.of(mesh), {}
        else:
            sizes = dict(zip(names, mesh.shape, strict=True))
            same = [n for n in names if n in SUMMED and n != "expert" and sizes[n] > 1]
            others = {n: mesh.get_group(n) for n in names if n not in SUMMED and sizes[n] > 1}
            tokens = cls(mesh.get_group("expert"), group_along(mesh, same) if same else None)
        axes = others | ({"expert": tokens.group} if tokens.world > 1 else {})
        if tokens.replicas is None:
            own = cls.alone(axes)
            own.size = tokens.size
            return tokens, own
        return tokens, cls(tokens.replicas, axes=axes, size=tokens.size)

    @property
    def position(self) -> dict[str, tuple[int, int]]:
        """Which part of the model this rank holds: (index, number of parts) by axis."""
        places = {"data": (self.place, self.shards)}
        for axis, group in self.axes.items():
            places[axis] = dist.get_rank(group), dist.get_world_size(group)
        return places

    @cached_property
    def other_axes(self) -> Self:
        """This rank alone on the data axis: what replicated gradients have to do with a mesh."""
        return self.alone(self.axes)

    @property
    def everyone(self) -> Self:
        """All ranks that hold a part of the model: the sharding group, or the world of a mesh."""
        return type(self)() if self.axes else self

    # -- agreements

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the values of the first rank, in place: across replicas, then inside."""
        for group in reversed(self._groups()):
            works = [
                dist.broadcast(tensor.detach(), group_src=0, group=group, async_op=True)
                for tensor in tensors
            ]
            for work in works:
                work.wait()

    def gather_along(self, axis: str, value: Any) -> list[Any]:
        """As `gather_objects`, over an axis of the mesh; [value] where there is no such axis."""
        return _all_gather_object(value, self.axes[axis]) if axis in self.axes else [value]

    def gather_objects(self, value: Any) -> list[Any]:
        """One small picklable value of each rank, on every rank, in order of replica and rank."""
        values = [value]
        for group in self._groups():
            values = [one for several in _all_gather_object(values, group) for one in several]
        return values

    def check_equal(self, what: str, lines: Sequence[str]) -> None:
        """Raise RuntimeError on all ranks unless all have these lines; names the first other."""
        digests = self.gather_objects(hashlib.sha256("\n".join(lines).encode()).digest())
        if len(set(digests)) == 1:
            return
        everyone = self.gather_objects(list(lines))
        for lines in zip_longest(*everyone, fillvalue="nothing more"):
            other = next((r for r, line in enumerate(lines) if line != lines[0]), None)
            if other is not None:
                raise RuntimeError(
                    f"{what} differ between ranks: rank 0 has {lines[0]}, rank {other} has "
                    f"{lines[other]}. Fix: build the same model on every rank, with the same "
                    "arguments."
                )

    def _groups(self) -> list[dist.ProcessGroup]:
        """The groups that have more than one rank, the sharding one first."""
        groups = [(self.group, self.world), (self.replicas, self.copies)]
        return [group for group, ranks in groups if ranks > 1]

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[Any], list[Any]]:
        """Messages of this rank, (tensor, rank of the group) each, started together.

        Returns the works of sends and of receives; NCCL has one work for all. Between two ranks,
        messages in one direction arrive in their order, and have no other name.

        [Note: who is first] Where messages are not one call, two NCCL streams that both send first
        would wait for each other. So of any two ranks the lower one sends first.
        """
        ops = [(dist.isend, *one) for one in sends] + [(dist.irecv, *one) for one in receives]
        order = sorted(
            range(len(ops)), key=lambda k: (ops[k][0] is dist.isend) != (ops[k][2] > self.rank)
        )
        calls = [dist.P2POp(op, t, group=self.group, group_peer=peer) for op, t, peer in ops]
        works = dist.batch_isend_irecv([calls[k] for k in order]) if ops else []
        if len(works) < len(ops):
            return (works if sends else []), (works if receives else [])
        by_call = dict(zip(order, works, strict=True))
        sent = [by_call[k] for k in range(len(sends))]
        return sent, [by_call[k] for k in range(len(sends), len(ops))]

    def exchange_rows(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Uneven all-to-all: sends[r] of the rows (n, ...) go to rank r, receives[r] come."""
        if self.world == 1:
            return rows
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows, receives, sends, group=self.group)
        return received


def _all_gather_object(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def group_along(mesh: dist.DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup | None:
    """The group of this rank along these axes of a mesh together; None for the world."""
    return mesh.get_group(axes[0]) if len(axes) == 1 else _ranks_of(mesh[tuple(axes)])


def _ranks_of(mesh: dist.DeviceMesh) -> dist.ProcessGroup | None:
    """The group of all ranks of a mesh; None for the world."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return None
    return dist.new_group(ranks, use_local_synchronization=True)


def _not_the_world(
    axes: Mapping[str, dist.ProcessGroup | None],
) -> dict[str, dist.ProcessGroup | None]:
    """See [Note: the world is not held]."""
    return {n: None if group is dist.group.WORLD else group for n, group in axes.items()}


def backend_of(backend: str, device: str) -> str:
    """The backend of a type of device: "nccl" of "cpu:gloo,cuda:nccl" for "cuda"."""
    parts = dict(part.split(":") for part in backend.split(",") if ":" in part)
    return parts.get(device, backend)


def _refuse_forgotten_init() -> None:
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise RuntimeError(
            f"this is one of {world} ranks (WORLD_SIZE={world}), but torch.distributed was not "
            "initialised, so each would train alone. Fix: call "
            "torch.distributed.init_process_group() first."
        )
