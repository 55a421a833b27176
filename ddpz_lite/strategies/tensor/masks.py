"""Random masks under tensor parallelism: the same where activations are, others where they differ.

Between the layers that are cut all ranks have the same activation, and must drop the same elements
of it: otherwise their norms and embeddings would train apart. Inside attention each rank has heads
of its own, and with sequence parallelism tokens of its own: the same mask for all would drop the
same places in each, as no single process does.

So all ranks of the group draw from torch's generator with one seed (`draw_alike`), and a module
whose activations differ draws one number from it, the same on all ranks, and seeds its own masks
with that number and the rank (`draw_apart`). Recomputation (torch.utils.checkpoint) restores
torch's generator, and so these masks, too.

[Note: in step] Code between that draws random numbers on some ranks of the group only would bring
the generators apart. Draw data with a generator of its own.

Source: Shoeybi et al., "Megatron-LM", 2019, appendix B.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpz_lite.strategies.comm import Comm


def draw_alike(comm: Comm) -> None:
    """Seed torch's generators with a number that rank 0 draws."""
    seed = torch.randint(2**62, ())
    comm.broadcast([seed])
    torch.manual_seed(seed.item())


def draw_apart(module: nn.Module, comm: Comm) -> None:
    """Give each rank masks of its own in the forwards of the module, in training."""
    before: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def enter(module: nn.Module, _: Any) -> None:
        if module.training:
            seed = torch.randint(2**62, ()).item() + comm.rank
            on_gpu = torch.cuda.is_initialized()
            before.append((torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None))
            torch.manual_seed(seed)

    def leave(*_: Any) -> None:
        if before:
            host, gpu = before.pop()
            torch.set_rng_state(host)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
