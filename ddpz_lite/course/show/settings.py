"""What an option is called in FSDP2, DeepSpeed and Megatron-LM, and which keys DeepSpeed reads.

    here("torch.amp:GradScaler(init_scale)")    what is wrong with a name of the installed torch
    fate(config)            {key: "read", "ignored" or "an error"} for a DeepSpeed configuration

Names and keys stand in settings.json: read in the sources that it names, at the versions that it
names. DeepSpeed and Megatron-LM are not imported. What a row says of torch is run by
tests/site/test_options.py, and book/options.py makes a page of all rows.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any


@cache
def stored() -> dict[str, Any]:
    """settings.json: frameworks, options, and DeepSpeed's keys."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def short(name: str) -> str:
    """`fully_shard(mesh)` of `torch.distributed.fsdp:fully_shard(mesh)`."""
    return name.partition(":")[2] or name


def here(name: str) -> str | None:
    """None if the installed torch has `module:object(argument, ...)`; else what it lacks."""
    module, _, path = name.partition(":")
    path, _, arguments = path.rstrip(")").partition("(")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            return f"{module} has no {path}"
        found = getattr(found, part)
    known = {field.name for field in fields(found)} if is_dataclass(found) else None
    known = known or set(inspect.signature(found).parameters)
    missing = [one for one in arguments.split(", ") if one and one not in known]
    return f"{path} has no {', '.join(missing)}" if missing else None


def fate(config: Mapping[str, Any]) -> dict[str, str]:
    """What DeepSpeed does with each key of a configuration: "read", "ignored" or "an error".

    The top level is a dict, from which it takes what it knows; what it does not know it does not
    look at. zero_optimization, bf16 and fp16 are models that forbid other keys.
    """
    keys = stored()["deepspeed_keys"]
    found = {}
    for key, value in config.items():
        known = key in keys["top"]
        found[key] = "read" if known else "ignored"
        if isinstance(value, Mapping):
            strict = key in keys
            for inner in value:
                if strict:
                    found[f"{key}.{inner}"] = "read" if inner in keys[key] else "an error"
                elif not known:
                    found[f"{key}.{inner}"] = "ignored"
    return found
