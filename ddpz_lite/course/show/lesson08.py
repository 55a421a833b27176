"""The table of the ZeRO paper, the bytes that its formula leaves out, a limit for memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ddpz_lite.course.show.charts import lines

# Rajbhandari et al. 2020, table 1: GB per device for 7.5 B, 128 B and 1 T, each at stages 1 to 3.
TABLE_1 = """
1     120  120  120   2048 2048 2048  16000 16000 16000
4     52.5 41.3 30    896  704  512   7000  5500  4000
16    35.6 21.6 7.5   608  368  128   4750  2875  1000
64    31.4 16.6 1.88  536  284  32    4187  2218  250
256   30.4 15.4 0.47  518  263  8     4046  2054  62.5
1024  30.1 15.1 0.12  513  257  2     4011  2013  15.6"""
SIZES = {"7.5 B": 7.5e9, "128 B": 128e9, "1 T": 1e12}


def against_table_1(bytes_per_rank: Callable[[float, int, int], float]) -> float:
    """Print what `bytes_per_rank(num_params, world_size, stage)` says for each entry, in GB.

    Returns the largest difference from the paper, in units of its last printed digit. It sometimes
    rounds and sometimes cuts, so that a difference below 1 is none.
    """
    columns = [(size, stage) for size in SIZES.values() for stage in (1, 2, 3)]
    print("model   ", *(f"{name:>8}{'':18}" for name in SIZES))
    print("stage   ", *(f"{stage:8}" for _, stage in columns))
    worst = 0.0
    for line in TABLE_1.split("\n")[1:]:
        world_size, *printed = line.split()
        row = []
        for (size, stage), digits in zip(columns, printed, strict=True):
            value = bytes_per_rank(size, int(world_size), stage) / 1e9
            unit = 10.0 ** -len(digits.partition(".")[2])
            worst = max(worst, abs(value - float(digits)) / unit)
            row.append(f"{value:8.5g}")
        print(f"N = {world_size:4}", *row)
    return worst


def state_by_ranks(
    bytes_per_rank: Callable[[float, int, int], float], names: Mapping[int, str]
) -> None:
    """Draw the GB of state per rank of 7.5 B parameters, for each stage in `names`."""
    worlds = [2**k for k in range(11)]
    lines(
        {
            name: (worlds, [bytes_per_rank(7.5e9, n, stage) / 1e9 for n in worlds])
            for stage, name in names.items()
        },
        at={"a device of 48 GB": 48},
        x="ranks",
        y="GB per rank",
        title="State of 7.5 B parameters (modelled)",
        log="xy",
        alt="State of 7.5 billion parameters per rank. DDP stays at 120 GB. ZeRO-1 levels off at "
        "30, ZeRO-2 at 15, ZeRO-3 falls in proportion to the ranks, to 0.12 GB at 1,024.",
    )


def beyond_formula(model: Any, optimizer: Any, stage: int, num_params: int) -> dict[str, float]:
    """Bytes of fp32 state that this rank holds above the formula of its stage, by reason.

    model, optimizer: what `dz.parallelize` returned, after a step. num_params: of the full model.
    """
    even = num_params / (dist.get_world_size() if stage else 1)  # a share of Ψ/N
    layouts = [flat.layout for flat in model.flats]  # flat buffers; stage 0 has none
    full = sum(layout.padded for layout in layouts) or num_params
    shard = sum(layout.shard_numel for layout in layouts) or num_params
    parameters = shard - even if stage == 3 else full - num_params  # padding, in elements
    gradients = shard - even if stage >= 2 else 0
    owned = sum(tensor.numel() for tensor in optimizer.shards())  # without padding
    tensors = sum(len(bucket.params) for bucket in model.flats or model.buckets)
    return {
        "padding": 4 * (parameters + gradients),
        "uneven": 8 * (owned - even),  # AdamW's two means
        "flags": 0 if stage == 1 else 4 * tensors,
        "counters": 4 * len(optimizer.state),
    }


def limit_memory(more: int, device: torch.device) -> bool:
    """From here on this process gets at most `more` bytes. False where a system cannot do that."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(more / total, device)
        return True
    try:
        import resource

        with open("/proc/self/status") as status:
            now = next(int(line.split()[1]) * 1024 for line in status if "VmData" in line)
    except (ImportError, FileNotFoundError):
        return False
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, now + more))
    return True
