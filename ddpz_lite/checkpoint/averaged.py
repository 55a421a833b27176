"""An average of the weights, kept as this rank's parts of them: at stage 3 an N-th on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from ddpz_lite.checkpoint.parts import flats_of, local_parameters, plain, refresh, write_back


class AveragedModel(swa_utils.AveragedModel):
    """torch's AveragedModel of a model of any stage; same arguments, same `update_parameters`.

        ema = dz.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
        ...
        optimizer.step()
        ema.update_parameters(model)
        ...
        with ema.applied(model):  # evaluate, dz.full_state_dict(model), dz.save_checkpoint(...)
            loss = next_token_loss(model(x), y)

    torch's own copies the model, and the copy of a sharded one would gather the original. This one
    copies what the optimizer steps on, so updates are local: shards at stages 1 to 3, and in the
    optimizer's dtype, for in the 16 bits of compute an average would stand still.

    To load an average, load a checkpoint that was saved inside `applied`, inside `applied`.
    `n_averaged` is a number of torch's: save it as `extra`.
    """

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(_Parts(model), *args, **kwargs)

    def update_parameters(self, model: nn.Module) -> None:
        super().update_parameters(_Parts(model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "the average has no forward: it holds this rank's parts of the weights. Fix: with "
            "average.applied(model): model(...), on every rank."
        )

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model has the average's weights and buffers inside, and its own again afterwards.

        Every rank must enter and leave, between two steps. What is changed inside, by a load for
        example, is the average's.
        """
        self._exchange(model)
        try:
            yield model
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        params = list(local_parameters(model).values())
        theirs = [here.part.tensor for here in params] + list(plain(model).buffers())
        for ours, tensor in zip(_all(self.module), theirs, strict=True):
            held = tensor.clone()
            tensor.copy_(ours)
            ours.copy_(held)
        for here in params:
            write_back(here)
        for flat in flats_of(model):
            refresh(flat)


class _Parts(nn.Module):
    """This rank's parts of the parameters, as parameters without gradients, and all buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parts = [here.part.tensor for here in local_parameters(model).values()]
        self.parts = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in parts)
        for index, buffer in enumerate(plain(model).buffers()):
            self.register_buffer(f"buffer{index}", buffer)


def _all(parts: nn.Module) -> list[torch.Tensor]:
    return [*parts.parameters(), *parts.buffers()]
