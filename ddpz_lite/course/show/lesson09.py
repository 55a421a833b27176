"""How evenly optimizer state is distributed over the ranks when whole tensors have owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table
from ddpz_lite.course.show.style import TEXT_COLOR, bytes_unit, style_of
from ddpz_lite.model import GPT, GPTConfig

BYTES = 8  # of AdamW's state in fp32, per element
LARGER = {  # the sizes of GPT-2, and a small model with a large vocabulary
    "GPT-2, 124 M": {"vocab_size": 50257, "layers": 12, "heads": 12, "width": 768},
    "GPT-2, 355 M": {"vocab_size": 50257, "layers": 24, "heads": 16, "width": 1024},
    "four layers, 256,000 tokens": {"vocab_size": 256_000, "layers": 4, "heads": 16, "width": 1024},
}


def larger_models() -> dict[str, list[int]]:
    """{name: elements of each parameter} of models that are built as shapes only."""
    found = {}
    for name, sizes in LARGER.items():
        with torch.device("meta"):
            model = GPT(GPTConfig(context=1024, tied=True, **sizes))
        found[name] = [p.numel() for p in model.parameters()]
    return found


def balance(name: str, load: Sequence[int]) -> tuple[Any, str, Table]:
    """Figure, alt text and table, for `show.explore`. load: elements that each rank owns.

    Dashed: an equal share, as a flat range has it, padding included.
    """
    world = len(load)
    share = -(-sum(load) // world)
    unit, unit_name = bytes_unit(BYTES * share)
    bars = sorted((BYTES * n / unit for n in load), reverse=True)
    equal = BYTES * share / unit
    fig, axes = figure(height=2.8)
    with house_style():
        axes.bar(range(world), bars, **style_of("optimizer").patch_kwargs)
        axes.axhline(equal, color=TEXT_COLOR, linestyle="--", linewidth=1.2)
        axes.set_xlabel("ranks, from the fullest to the emptiest (dashed: an equal share)")
        axes.set_ylabel(f"AdamW state, {unit_name}")
        axes.set_xticks([])
        axes.set_title(
            f"{name}, {world} ranks: the fullest has {max(load) / share:.2f} × an equal share"
        )
    alt = f"{name} over {world} ranks. By parameter: from {bars[-1]:.1f} to {bars[0]:.1f} "
    alt += f"{unit_name}. An equal share is {equal:.1f} {unit_name}."
    rows = [[place, round(bar, 3), round(equal, 3)] for place, bar in enumerate(bars)]
    head = ["place", f"by parameter, {unit_name}", f"flat, {unit_name}"]
    return fig, alt, [head, *rows[:16]]
