"""Bytes copied between the host's memory and a device's, counted as they are copied."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)


class HostTraffic(TorchDispatchMode):
    """Counts what crosses between host and device inside the block, in bytes.

        with HostTraffic() as moved:
            loss.backward()
            optimizer.step()
        moved.up, moved.down

    `costs.offload_moved` is the model. A copy that casts does so on the host, whichever way it
    goes, so what crosses has the dtype of the device's side. Without a GPU nothing crosses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in COPIES:
            source = args[1] if func.overloadpacket is COPIES[0] else args[0]
            here, there = out.device.type == "cpu", source.device.type == "cpu"
            if there and not here:
                self.up += out.numel() * out.element_size()
            elif here and not there:
                self.down += out.numel() * source.element_size()
        return out
