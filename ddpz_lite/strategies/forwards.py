"""Code around the forward of a module: the mechanics, for Python and for torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch._dynamo.decorators import skip


def wrap_forward(
    module: nn.Module,
    pre_forward: Callable[[], bool | None],
    post_forward: Callable[[bool, Any, Any], None],
    exit_forward: Callable[[bool], None],
    skipped: Callable[[], bool],
) -> None:
    """Call pre_forward before the module's forward and post_forward after it.

    `module(x)` and `module.forward(x)` both come here. pre_forward: returns what the other two get,
    or None if they are not to be called. post_forward: also gets what was given to the module, and
    its output. exit_forward: instead, if forward raises. skipped: whether to call forward alone.
    """
    forward = module.forward

    @skip  # torch.compile: compile `forward`, not this
    def run(*args: Any, **kwargs: Any) -> Any:
        entered = pre_forward()
        if entered is None:
            return forward(*args, **kwargs)
        try:
            output = forward(*args, **kwargs)
        except BaseException:
            exit_forward(entered)
            raise
        post_forward(entered, (args, kwargs), output)
        return output

    def run_unless_skipped(*args: Any, **kwargs: Any) -> Any:
        return (forward if skipped() else run)(*args, **kwargs)

    module.__dict__["forward"] = wraps(forward)(run_unless_skipped)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    inner: Iterable[Any] = ()
    if is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    return [tensor for item in inner for tensor in tensors_in(item)]
