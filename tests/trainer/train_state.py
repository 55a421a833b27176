"""For the tests of the trainer: a small text, and a checkpoint as something to compare."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from ddpz_lite.checkpoint.save_load import load_checkpoint
from ddpz_lite.data import corpus
from ddpz_lite.trainer.loop import build, shard
from ddpz_lite.trainer.recipe import Recipe


def write_text(path: Path, length: int, seed: int = 0) -> str:
    """A text of `length` bytes, in words."""
    draw = random.Random(seed)
    vocabulary = ["rank", "world", "unit", "shard", "full", "bucket", "step", "gather", "reduce"]
    path.write_text(" ".join(draw.choice(vocabulary) for _ in range(length))[:length])
    return str(path)


def state(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint, of whatever stage and world: checked sums, then read."""
    plain = Recipe(
        **{n: getattr(recipe, n) for n in ("text", "context", "layers", "heads", "width")}
    )
    gpt = build(plain, corpus(recipe.text))
    model, optimizer = shard(plain, gpt)
    extra = load_checkpoint(folder, model, optimizer)
    inside = folder / (folder / "CURRENT").read_text()
    found = {"extra": extra, "rates": [group["lr"] for group in optimizer.param_groups]}
    found |= {"scale": torch.load(inside / "extra.pt")["loss_scale"]}
    found |= {path.name: torch.load(path) for path in inside.glob("rng-*.pt")}
    for name, param in gpt.named_parameters():
        found[name] = param.detach()
        found |= {f"{name}/{key}": value for key, value in optimizer.state[param].items()}
    assert len(found) > 4 * 10 and sum(name.startswith("rng-") for name in found)
    return found


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Equal, bit for bit."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, b[name]), name
        elif name.startswith("rng-"):
            assert torch.equal(value["torch"], b[name]["torch"]), name
        else:
            assert value == b[name], name
