"""Send a function from a notebook cell to a rank, and its result back.

cloudpickle sends functions of `__main__` (cells, scripts) by value, together with the globals and
helper functions they use. What cannot be sent is named here, under its name in the user's code,
before any process is started.
"""

from __future__ import annotations

import importlib
import inspect
import io
import linecache
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any


class CannotSend(TypeError):
    """Something that a job needs, or returns, cannot be sent between processes."""


def pack_call(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    """The call as bytes. Raises CannotSend, naming what cannot be sent."""
    try:
        return _call_bytes((fn, args, kwargs))
    except Exception as error:
        path, value, reason = _culprit(fn, args, kwargs) or (f"{_name(fn)}()", fn, error)
        raise CannotSend(
            f"launch: {path} is a {_type(value)} and cannot be sent to another process ({reason}). "
            "Fix: create it inside the function, on the rank, or pass plain data instead."
        ) from None


def pack_result(value: Any) -> bytes:
    """A rank's result as bytes, CUDA tensors copied to the CPU. Raises CannotSend."""
    try:
        return _result_bytes(value)
    except Exception as error:
        where, part = _unsendable_part(value)
        raise CannotSend(
            f"the function returned {where}, a {_type(part)}, which cannot be sent back to the "
            f"notebook ({error}). Fix: return data: numbers, strings, tensors, lists, dicts."
        ) from None


def cell_sources() -> dict[str, tuple[str, list[str]]]:
    """{file name: ("cell 12", its lines)} of the cells run so far; empty outside IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {
        name: (f"cell {number}", linecache.getlines(name))
        for name, number in numbers.items()
        if name in linecache.cache
    }


def _call_bytes(value: Any) -> bytes:
    """[Note: modules of another type] cloudpickle sends a submodule with a function that names both
    the package and the submodule: `dist` and a user's global called `config` bring
    `torch.distributed.config`. It sends a module by name only if its type is exactly ModuleType;
    torch's `config` modules have their own types.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            is_imported = isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj
            if is_imported and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    return _dumped(Pickler, value)


def _result_bytes(value: Any) -> bytes:
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
                return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if type(obj) is torch.Tensor and _is_view(obj):
                own = obj.detach().clone().requires_grad_(obj.requires_grad)
                return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    return _dumped(Pickler, value)


def _dumped(pickler: type[pickle.Pickler], value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _is_view(tensor: Any) -> bool:
    """Whether it is a view of a larger buffer, which would be sent once for every view."""
    import torch

    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _culprit(
    fn: Callable, args: tuple, kwargs: dict, seen: frozenset[int] = frozenset()
) -> tuple[str, Any, Exception] | None:
    """(name, value, error) of what fn(*args, **kwargs) needs and cannot be pickled."""
    for path, value in _parts(fn, args, kwargs):
        if id(value) in seen:
            continue
        try:
            _call_bytes(value)
        except Exception as error:
            helper = inspect.isfunction(value)
            return (_culprit(value, (), {}, seen | {id(fn)}) if helper else None) or (
                path,
                value,
                error,
            )
    return None


def _parts(fn: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[str, Any]]:
    yield from ((f"args[{i}] of {_name(fn)}()", value) for i, value in enumerate(args))
    yield from ((f"kwargs[{key!r}] of {_name(fn)}()", value) for key, value in kwargs.items())
    function = inspect.unwrap(fn)
    if inspect.ismethod(function):
        yield f"the object behind {_name(fn)}()", function.__self__
        function = function.__func__
    if inspect.isfunction(function):
        yield from _defaults(function)
        uses = inspect.getclosurevars(function)
        for name, value in {**uses.globals, **uses.nonlocals}.items():
            yield f"`{name}`, which {_name(fn)}() uses,", value


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield f"`{name}`, an argument of {_name(function)}() with a default,", parameter.default


def _unsendable_part(
    value: Any, path: str = "a value", above: tuple[int, ...] = ()
) -> tuple[str, Any]:
    """(path, value) of the element that cannot be pickled; `above`: ids of its containers."""
    if isinstance(value, dict):
        children = [(f"element [{key!r}]", child) for key, child in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(f"element [{i}]", child) for i, child in enumerate(value)]
    else:
        children = []
    above = (*above, id(value))
    for name, child in children:
        if id(child) in above:
            continue
        try:
            _result_bytes(child)
        except Exception:
            return _unsendable_part(child, name, above)
    return path, value


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _type(value: Any) -> str:
    kind = type(value)
    return (
        kind.__name__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__name__}"
    )
