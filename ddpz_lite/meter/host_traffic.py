"""Count the bytes that are copied between host memory and a device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)


class HostTraffic(TorchDispatchMode):
    """Counts the bytes copied between host and device inside the block.

        with HostTraffic() as moved:
            loss.backward()
            optimizer.step()
        moved.up, moved.down

    `up` is to the device, `down` to the host; see `costs.offload_moved`. A copy that casts
    does so on the host in both directions, so the bytes have the device's dtype. Without a GPU both
    are 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in COPIES:
            source = args[1] if func.overloadpacket is COPIES[0] else args[0]
            to_host, from_host = out.device.type == "cpu", source.device.type == "cpu"
            if from_host and not to_host:
                self.up += out.numel() * out.element_size()
            elif to_host and not from_host:
                self.down += out.numel() * source.element_size()
        return out
