"""The full state dict of an optimizer: read from one of any stage, or loaded into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from ddpz_lite.checkpoint.all_ranks import on_all_ranks
from ddpz_lite.checkpoint.parts import (
    Part,
    comm_of,
    local_parameters,
    of_all_parts,
    same_experts,
)
from ddpz_lite.checkpoint.save_load import (
    empty_state,
    is_cut,
    names_in,
    names_of,
    restore,
    tensors_of,
)


@torch.no_grad()
def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, dict[str, Tensor]] | list[dict[str, Any]]]:
    """The state of the optimizer by parameter name, in full shapes, on the host.

    In the form of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict with
    full_state_dict=True, and so of its `set_optimizer_state_dict` too:

        {"state": {"head.weight": {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}, ...},
         "param_groups": [{"lr": ..., ..., "params": ["head.weight", ...]}, ...]}

    Every rank must call it and gets the result; the state of one parameter is gathered at a time.
    Raises TypeError for an optimizer that keeps something other than tensors.
    """
    own = comm_of(model, optimizer)
    comm, params = own.everyone, local_parameters(model, optimizer)
    shapes = of_all_parts(model, own, {name: here.shape for name, here in params.items()})
    tensors = on_all_ranks(comm, lambda: tensors_of(model, optimizer, params, own.place))
    local: dict[str, dict[str, tuple[list[tuple[int, int]] | None, Tensor]]] = defaultdict(dict)
    for path, value in tensors.items():
        kind, _, rest = path.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == "optimizer":
            spans = value.spans if isinstance(value, Part) else None
            part = value.tensor if isinstance(value, Part) else value
            local[name][key] = spans, part.detach().to("cpu", copy=True)
    state: dict[str, dict[str, Tensor]] = {}
    for name, shape in shapes.items():
        found: dict[str, Tensor] = {}
        for parts in comm.gather_objects(local.get(name, {})):
            for key, (spans, part) in parts.items():
                if spans is None:
                    found[key] = part
                    continue
                full = found.setdefault(key, part.new_zeros(shape)).view(-1)
                for (start, length), piece in zip(
                    spans, part.split([length for _, length in spans]), strict=True
                ):
                    full[start : start + length] = piece
        if found:
            state[name] = found
    return {"state": state, "param_groups": _groups(model, optimizer)}


@torch.no_grad()
def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load what `full_optimizer_state_dict`, or torch's function, gave; each rank keeps its part.

    Into any stage and world size; options of the groups are taken over too. Raises ValueError on
    all ranks for names or shapes that are not the model's.
    """
    own, given = comm_of(model, optimizer), state_dict["state"]
    params = local_parameters(model, optimizer)
    shapes = of_all_parts(model, own, {name: here.shape for name, here in params.items()})
    on_all_ranks(own.everyone, lambda: _check_names(given, shapes))
    saved = {
        f"optimizer/{name}/{key}": _metadata(key, torch.as_tensor(value), shapes[name])
        for name, values in given.items()
        for key, value in values.items()
    }
    states = empty_state(params, saved, optimizer)
    for name, state in states.items():
        for key, value in state.items():
            full = torch.as_tensor(given[name][key])
            if is_cut(saved[f"optimizer/{name}/{key}"], params[name]):
                params[name].part.like(value).copy_from(full.reshape(-1))
            else:
                value.copy_(full)
    options = {
        name: {option: value for option, value in group.items() if option != "params"}
        for group in state_dict["param_groups"]
        for name in group["params"]
    }
    by_key = {params[name].key: state for name, state in states.items()}
    restore(model, optimizer, by_key, {"groups": options, "loss_scale": None})


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups with names; those of all experts and all stages of a pipeline are joined."""
    names = names_of(model)
    local = [
        {option: value for option, value in group.items() if option != "param_names"}
        | {"params": names_in(group, names)}
        for group in optimizer.param_groups
    ]
    joined = _join(same_experts(model).gather_along("expert", local))
    return _join(comm_of(model, optimizer).gather_along("pipe", joined))


def _join(groups_by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        parts[0] | {"params": list(dict.fromkeys(n for part in parts for n in part["params"]))}
        for parts in zip(*groups_by_rank, strict=True)
    ]


def _check_names(given: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    strangers = [name for name in given if name not in shapes]
    if strangers:
        raise ValueError(
            f"the state dict has the state of {strangers[0]}, and the model has no parameter of "
            "this name. Fix: pass what full_optimizer_state_dict() gave for the same model."
        )
    for name, values in given.items():
        for key, value in values.items():
            shape = list(torch.as_tensor(value).shape)
            square = len(shape) == 2 and shape[0] == shape[1]  # Shampoo's products of rows
            fits = all(n in (1, m) for n, m in zip(shape, shapes[name], strict=False))
            if not (fits or square):
                raise ValueError(
                    f"{key} of {name} has shape {shape}, and the parameter {shapes[name]}. Fix: "
                    "build the model with the configuration that was saved."
                )


def _metadata(key: str, value: Tensor, shape: list[int]) -> TensorStorageMetadata:
    """As a checkpoint would have it: state in the shape of its parameter is laid flat."""
    flat = list(value.shape) == shape and key != "step"
    size = torch.Size([value.numel()]) if flat else value.shape
    return TensorStorageMetadata(TensorProperties.create_from_tensor(value), size, [])
