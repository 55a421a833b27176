"""Assumption mutants: the solution itself, behind a wrapper that assumes what no text allows.

`mutants` changes a solution's source. These change what it may assume of its callers:

frozen      argument k is the first one that was handed over with arguments of these shapes
hard-coded  a number or word is the first one that the task's cases hand over
kept        a call with arguments of known shapes does what the first such call did
shared      all instances of a class have one `__dict__`

Functions, a class's constructor and its public methods, and a function that an answer returns are
wrapped alike. A judge that lets one pass has no case in which that argument alone is another.
ASSUMED of tests/answers/lessonNN.py lists those that are right answers, each with the reason.

    cd tests && python -m answers.assumptions 09 [part of a task's name]
"""

from __future__ import annotations

import inspect
import pickle
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from answers import trying
from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.run import draw, judge_all
from ddpz_lite.course.check.task import Task, tasks
from ddpz_lite.course.check.together import observe_together

SECONDS = 8.0  # until a mutant's turn is ended
PLAIN = (bool, int, float, str)

WRAPPER = '''
import copy as _copying
import inspect as _inspecting
import pickle as _pickling
from pathlib import Path as _Path

import torch as _torch


class _Assuming:
    """One assumption about the arguments of one function, kept for all calls on a rank."""

    def __init__(self, how, name, value=None):
        self.how, self.name, self.value, self.first = how, name, value, {}

    def shape(self, x):
        if isinstance(x, _torch.Tensor):
            return "tensor", tuple(x.shape), str(x.dtype), x.requires_grad
        if isinstance(x, _torch.nn.Module):
            return "module", tuple(self.shape(t) for t in (*x.parameters(), *x.buffers()))
        if isinstance(x, (list, tuple)):
            return "list", tuple(map(self.shape, x))
        if isinstance(x, dict):
            return "dict", tuple((str(key), self.shape(value)) for key, value in x.items())
        return type(x).__name__

    def tensors(self, x):
        if isinstance(x, _torch.Tensor):
            return [x] + ([x.grad] if x.is_leaf and x.grad is not None else [])
        if isinstance(x, _torch.nn.Module):
            return [t for p in (*x.parameters(), *x.buffers()) for t in self.tensors(p)]
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
        return [t for part in parts for t in self.tensors(part)]

    def copied(self, x):
        if isinstance(x, (list, tuple)):
            return type(x)(map(self.copied, x))
        if isinstance(x, dict):
            return {key: self.copied(value) for key, value in x.items()}
        if not isinstance(x, _torch.Tensor):
            return x
        new = x.detach().clone().requires_grad_(x.requires_grad)
        new.grad = x.grad.clone() if x.is_leaf and x.grad is not None else None
        return new

    def __call__(self, function, args, options):
        try:
            bound = _inspecting.signature(function).bind(*args, **options)
            bound.apply_defaults()
        except (TypeError, ValueError):
            return function(*args, **options)
        given = bound.arguments
        if self.how == "recorded":
            file = _Path(self.value)
            if not file.exists():
                plain = {k: v for k, v in given.items() if type(v) in (bool, int, float, str)}
                file.write_bytes(_pickling.dumps(plain))
            return function(*args, **options)
        if self.how == "kept":
            return self.kept(function, bound)
        if self.name not in given:
            return function(*args, **options)
        real = given[self.name]
        if self.how == "hard-coded":
            given[self.name] = self.value
        else:
            key = tuple(self.shape(x) for name, x in given.items() if name != "self")
            given[self.name] = self.copied(self.first.setdefault(key, self.copied(real)))
        made = function(*bound.args, **bound.kwargs)
        self.write(real, given[self.name])
        return made

    def write(self, real, other):
        """What was changed in the stand-in, in the argument that was handed over."""
        if isinstance(real, dict):
            for key, value in other.items():
                if type(value) in (bool, int, float, str):
                    real[key] = value
        if isinstance(real, list) and len(real) == len(other):
            for i, value in enumerate(other):
                if not isinstance(value, (_torch.Tensor, list, dict)):
                    real[i] = value
                elif isinstance(value, dict):
                    self.write(real[i], value)
        with _torch.no_grad():
            for mine, its in zip(self.tensors(real), self.tensors(other)):
                if mine is not its and mine.shape == its.shape:
                    mine.copy_(its)

    def kept(self, function, bound):
        given = [x for name, x in bound.arguments.items() if name != "self"]
        key = tuple(map(self.shape, given))
        if key not in self.first:
            made = function(*bound.args, **bound.kwargs)
            after = [[t.detach().clone() for t in self.tensors(x)] for x in given]
            self.first[key] = self.copied(made), after
            return made
        made, after = self.first[key]
        with _torch.no_grad():
            for x, tensors in zip(given, after):
                for mine, its in zip(self.tensors(x), tensors):
                    mine.copy_(its)
        return self.copied(made)


def _assumed(function, assuming, inner=None):
    """The function under an assumption; `inner`: what it returns is a function under another."""

    def assumed(*args, **options):
        made = assuming(function, args, options) if assuming else function(*args, **options)
        return _assumed(made, inner) if inner else made

    assumed.__name__, assumed.__doc__ = function.__name__, function.__doc__
    assumed.__signature__ = _inspecting.signature(function)
    return assumed


def _with_method(kind, name, assuming):
    """A subclass whose method of that name is under an assumption, for all instances alike."""
    return type(kind)(
        kind.__name__, (kind,), {name: _assumed(getattr(kind, name), assuming)}
    )


def _shared(kind):
    """A subclass all of whose instances have one __dict__."""
    everything = {}

    class Shared(kind):
        def __init__(self, *args, **options):
            object.__setattr__(self, "__dict__", everything)
            super().__init__(*args, **options)

    Shared.__name__ = kind.__name__
    return Shared
'''


@dataclass(frozen=True)
class Assumption:
    """name: what is assumed of which argument; source: what follows the solution's cell."""

    name: str
    source: str


def make(task: Task, answer: Any, cases: list) -> list[Assumption]:
    """The assumption mutants of an answer. Runs it in its first case, to see what it is given."""
    made: list[Assumption] = []

    def add(kind: str, where: str, source: str) -> None:
        made.append(Assumption(f"{kind} {where}".strip(), WRAPPER + source))

    for where, parameters, wrap in _places(task.answer, answer):
        for name in parameters:
            add("frozen", f"{where}{name}", wrap(f"_Assuming('frozen', {name!r})"))
        for name, value in _first(task, cases, wrap).items():
            if name in parameters:
                code = wrap(f"_Assuming('hard-coded', {name!r}, {value!r})")
                add("hard-coded", f"{where}{name} = {value!r}", code)
        if parameters and not where.startswith("__init__"):
            add("kept", where.rstrip("."), wrap("_Assuming('kept', None)"))
    if isinstance(answer, type):
        add("shared", "", f"\n{task.answer} = _shared({task.answer})\n")
    return made


def _places(name: str, answer: Any) -> list[tuple[str, list[str], Any]]:
    """(name of the place, its parameters, from an assumption's source to a cell's) of an answer."""

    def parameters(function: Any) -> list[str]:
        return [p for p in inspect.signature(function).parameters if p not in ("self", "options")]

    if not isinstance(answer, type):
        at = [("", parameters(answer), lambda a: f"\n{name} = _assumed({name}, {a})\n")]
        returned = {"hierarchical": ["tensor"]}.get(name)  # functions that make functions
        if returned:
            code = f"\n{name} = _assumed({name}, None, {{}})\n"
            at.append(("its result: ", returned, lambda a: code.format(a)))
        return at
    methods = [m for m, f in vars(answer).items() if inspect.isfunction(f) and _is_public(m)]
    if issubclass(answer, torch.nn.Module):
        methods = ["__init__", *(m for m in methods if m == "forward")]
    return [
        (f"{m}.", parameters(getattr(answer, m)),
         lambda a, m=m: f"\n{name} = _with_method({name}, {m!r}, {a})\n")
        for m in methods
    ]  # fmt: skip


def _is_public(method: str) -> bool:
    return method == "__init__" or not method.startswith("_")


def _first(task: Task, cases: list, wrap: Any) -> dict[str, Any]:
    """The plain arguments of the first call at a place, in the first case."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "first")
        recorder = wrap(f"_Assuming('recorded', None, {str(file)!r})")
        observe_together(task, [_answer(task, recorder)], cases[0])
        return pickle.loads(file.read_bytes()) if file.exists() else {}


def _answer(task: Task, more: str = "") -> Any:
    cells = notebooks.program(trying.master(task.lesson), task.id)
    *given, (cell, source) = cells
    return trying.run([*given, (cell, source + (f"\n{WRAPPER}{more}" if more else ""))])[
        task.answer
    ]


def survivors(task: Task) -> tuple[list[str], list[str]]:
    """(names of all assumption mutants of a task, names of those that its judge lets pass)."""
    cases = draw(task)
    solution = _answer(task)
    if not inspect.isclass(solution) and not inspect.signature(solution).parameters:
        return [], []
    made = make(task, solution, cases)
    answers = [_answer(task, one.source.removeprefix(WRAPPER)) for one in made]
    verdicts = judge_all(
        task,
        answers,
        cases,
        exact=False,
        seconds=SECONDS,
        enough=lambda _, judging: bool(judging.failed()),
    )
    names = [one.name for one in made]
    return names, [n for n, verdict in zip(names, verdicts, strict=True) if verdict.solved]


def allowed(task: Task) -> dict[str, str]:
    """ASSUMED of the lesson's answers: name of an assumption -> why it is a right answer."""
    return getattr(trying.answers(task.lesson), "ASSUMED", {}).get(task.id, {})


def main(words: list[str]) -> None:
    for lesson in [word for word in words if word.isdigit()] or trying.lessons():
        parts = [word for word in words if not word.isdigit()] or [""]
        for task in tasks(lesson):
            if not any(part in task.id for part in parts):
                continue
            names, alive = survivors(task)
            known = [name for name in alive if name in allowed(task)]
            print(f"{task.id}: {len(names)} made, {len(alive)} alive, {len(known)} listed as right")
            for name in alive:
                print(f"    {'listed' if name in known else 'ALIVE '}  {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
