"""Which line a thread is in, asked by another thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpz_lite.wire import callsite

DEEP = """
def waits(reached, go_on, depth=200):
    if depth:
        return waits(reached, go_on, depth - 1)
    reached.set()
    go_on.wait()
"""


def asked_of(filename: str, ask: Callable[[int], object]) -> object:
    """What `ask` says of a thread that waits far below the first line of this file."""
    space, reached, go_on = {}, threading.Event(), threading.Event()
    exec(compile(DEEP, filename, "exec"), space)
    thread = threading.Thread(target=space["waits"], args=(reached, go_on))
    thread.start()
    try:
        assert reached.wait(20)
        return ask(thread.ident)
    finally:
        go_on.set()
        thread.join()


def test_a_thread_is_in_the_learner_s_innermost_line():
    assert asked_of("/home/l/train.py", callsite.of_thread) in ("train.py:5", "train.py:6")


def test_a_library_s_thread_and_one_that_is_gone_have_no_line():
    assert asked_of(str(Path(callsite.__file__).with_name("x.py")), callsite.of_thread) is None
    gone = threading.Thread(target=int)
    gone.start()
    gone.join()
    assert callsite.of_thread(gone.ident) is None


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_between_two_frames(collects):
    """Each frame of 200 is a new object, and a collection is due at every one."""
    seen, before, me = [], gc.get_threshold(), threading.get_ident()

    def note(phase: str, _: dict) -> None:
        if threading.get_ident() == me:  # and no other thread of the tests
            seen.append(phase)

    def ask(ident: int) -> str | None:
        gc.callbacks.append(note)
        gc.set_threshold(1)
        (gc.enable if collects else gc.disable)()
        try:
            found = callsite.of_thread(ident)
            assert gc.isenabled() == collects
            return found
        finally:
            gc.disable()
            gc.callbacks.remove(note)

    try:
        library = str(Path(callsite.__file__).with_name("x.py"))
        assert asked_of(library, ask) is None
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert len(seen) < 20  # before the walk and after it, one each
