"""Data over the boundary between an answer and its judge: tensors as safetensors, the rest as JSON.

Nothing that is read back can run code, whatever wrote it. What travels: None, bool, int, float, str
(numpy's as Python's), plain dense tensors; lists, tuples (read back as lists) and dicts of these.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

LIMIT = 64 << 20  # bytes of one rank's data
TREE = 1 << 18  # bytes of its JSON part, and of the description of its tensors
TENSOR = "tensor"  # {"tensor": "3"} stands for the tensor of that number
ITEMS = "items"  # {"items": [[key, value], ...]} stands for a dict
DEPTH = 40


class NotData(TypeError):
    """A value that is not data, or bytes that are not a value."""


def pack(value: Any) -> bytes:
    """A value as bytes: the length of the JSON part, the JSON part, the tensors.

    Raises NotData, naming the part that is not data.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_tree(value, "the result", tensors, 0)).encode()
    if len(tree) > TREE:
        raise NotData(f"the result holds {len(tree)} bytes besides its tensors; {TREE} are allowed")
    return struct.pack("<Q", len(tree)) + tree + save(tensors)


def unpack(raw: bytes, limit: int = LIMIT) -> Any:
    """The value behind `pack`'s bytes. Raises NotData for anything else, or more than `limit`."""
    if not 8 <= len(raw) <= limit:
        raise NotData(f"{len(raw)} bytes came where 8 to {limit} were expected")
    (length,) = struct.unpack_from("<Q", raw)
    described = raw[8 + length : 16 + length]  # begins with a length, too
    if length > TREE or int.from_bytes(described, "little") > TREE:
        raise NotData(f"more than {TREE} bytes came besides the tensors")
    try:
        tree = json.loads(raw[8 : 8 + length])
        return _value(tree, load(raw[8 + length :]))
    except NotData:
        raise
    except Exception as error:  # json, safetensors and struct each have their own
        raise NotData(f"the bytes that came are not data: {type(error).__name__}") from None


def _tree(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > DEPTH:
        raise NotData(f"{path} is nested more than {DEPTH} deep")
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.device.type == "meta":
            raise NotData(f"{path} is a {value.layout} tensor on {value.device}, not a plain one")
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {TENSOR: name}
    if kind in (list, tuple, torch.Size):
        return [_tree(v, f"{path}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict):
        pairs = [
            [
                _tree(k, f"a key of {path}", tensors, depth + 1),
                _tree(v, f"{path}[{k!r}]", tensors, depth + 1),
            ]
            for k, v in value.items()
        ]
        return {ITEMS: pairs}
    raise NotData(
        f"{path} is a {kind.__name__}; return data: numbers, strings, plain tensors, lists, dicts"
    )


def _value(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_value(part, tensors) for part in tree]
    if isinstance(tree, dict):
        if TENSOR in tree:
            if tree[TENSOR] not in tensors:  # else a few bytes could stand for gigabytes
                raise NotData("the bytes that came name a tensor that is not there, or one twice")
            return tensors.pop(tree[TENSOR])
        return {_value(k, tensors): _value(v, tensors) for k, v in tree[ITEMS]}
    return tree
