"""ZeRO-3 where parameters are used elsewhere than in their unit's own forward, by parts that are
called by themselves, by hooks of users, or are frozen for a while: as in one process, or refused.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_jobs import distance, raised
from torch import Tensor, nn

import ddpz_lite as dz
from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.strategies.unit_choice import split
from ddpz_lite.strategies.zero3 import ZeRO3

WIDTH, STEPS = 6, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gain


class View(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: len(x)]


class Model(nn.Module):
    """A stack of blocks; `way` is how the root uses their parameters besides."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.views = nn.ModuleList(View() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, held = self.first(x), None
        views = [view(x) for view in self.views]
        if self.way == "reads before":
            x = x * self.blocks[1].gain
        if self.way == "keeps":
            held = self.blocks[1].gain
        for block in self.blocks:
            if self.way == "calls forward":
                x = block.forward(x)
            elif self.way == "calls parts":
                x = torch.tanh(block.linear(x)) * block.gain
            else:
                x = block(x)
        if self.way == "reads after":
            x = x * self.blocks[1].gain + sum(block.gain for block in self.blocks)
        if self.way == "reads without gradients":
            with torch.no_grad():
                scale = self.blocks[0].gain + 1
            x = x * scale * self.blocks[0].gain
        if held is not None:
            x = x * held
        return self.head(x + views[0] * views[1])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


Program = Callable[[nn.Module, nn.Module, torch.optim.Optimizer, Tensor], None]


def plainly(model: nn.Module, module: nn.Module, optimizer: Any, x: Tensor) -> None:
    step(model, optimizer, x)


def evaluates(model: nn.Module, module: nn.Module, optimizer: Any, x: Tensor) -> None:
    """A forward without backward, with and without gradients, before each step and inside it."""
    with torch.no_grad():
        model(x)
    model(x)
    loss = model(x).sum()
    with torch.no_grad():
        model(x)
        module.blocks[0](x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def calls_parts(model: nn.Module, module: nn.Module, optimizer: Any, x: Tensor) -> None:
    """A block, or a module outside of all blocks, called alone; with and without gradients."""
    with torch.no_grad():
        module.blocks[0](x)
        module.head(module.first(x))
    step(model, optimizer, x)
    module.blocks[1](x)
    step(model, optimizer, x)
    module.head(module.blocks[2](x)).sum().backward()
    (model(x).sum() + module.blocks[1](x).sum() + module.head(x).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def freezes(model: nn.Module, module: nn.Module, optimizer: Any, x: Tensor) -> None:
    """The idiom of adversarial networks: parts are frozen for a step, or for a backward."""
    for part in (module.blocks[0], module.head.weight, module.blocks[2].gain):
        part.requires_grad_(False)
        step(model, optimizer, x)
        part.requires_grad_(True)
    loss = model(x).square().mean()
    module.blocks[1].requires_grad_(False)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    module.blocks[1].requires_grad_(True)
    model.requires_grad_(False)
    module.head.requires_grad_(True)
    step(model, optimizer, x)
    model.requires_grad_(True)
    step(model, optimizer, x)


def raises(model: nn.Module, module: nn.Module, optimizer: Any, x: Tensor) -> None:
    """A forward that raises leaves nothing behind."""
    handle = module.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    for called in (model, module.blocks[1]):
        with contextlib.suppress(ZeroDivisionError):
            called(x)
    handle.remove()
    module.blocks[1](x)
    step(model, optimizer, x)


def hooked(model: nn.Module) -> None:
    """A hook of a block that reads its parameters when its forward is over."""
    blocks = getattr(model, "module", model).blocks
    blocks[1].register_forward_hook(lambda block, _, out: out * block.linear.weight.norm())


WAYS = ("", "reads before", "keeps", "calls forward", "calls parts", "reads after")
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Program]] = {
    **{f"the root {way}": (lambda way=way: Model(way), evaluates) for way in WAYS},
    "reads without gradients": (lambda: Model("reads without gradients"), evaluates),
    "a later hook": (Model, plainly),
    "calls parts": (Model, calls_parts),
    "freezes": (Model, freezes),
    "raises": (Model, raises),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "kept": {"reshard_after_forward": False},
    "any order": {"prefetch": False},
}


def run(name: str, **options: Any) -> str:
    """What differs from one process: on equal batches the mean over ranks is what each rank has."""
    make, program = PROGRAMS[name]
    torch.manual_seed(0)
    plain = make()
    ours = ZeRO3(copy.deepcopy(plain), **options)
    for model in (plain, ours):
        if name == "a later hook":
            hooked(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for seed in range(STEPS):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            program(model, getattr(model, "module", model), optimizer, x)
    gap = distance(full_state_dict(ours), dict(plain.state_dict()))
    if gap > (0 if ours.comm.world == 2 else 2e-6):  # a mean of three equal numbers is rounded
        return f"{gap} from one process"
    gathered = [flat for flat in ours.flats if flat.full.untyped_storage().size()]
    return f"{len(gathered)} buffers are whole at rest" if gathered else ""


def elsewhere() -> dict[str, str]:
    torch.set_num_threads(1)
    messages = {f"{n}, {o}": run(n, **OPTIONS[o]) for n in PROGRAMS for o in OPTIONS}
    return {name: wrong for name, wrong in messages.items() if wrong}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.extra)])
def test_what_is_used_elsewhere_is_whole_there(world):
    assert list(dz.launch(elsewhere, world, record=False, timeout=200)) == [{}] * world


def step_inside_backward() -> tuple[float, int, int]:
    """A hook of each parameter steps on it, and drops its gradient."""
    torch.manual_seed(0)
    plain = Model()
    ours, calls = ZeRO3(copy.deepcopy(plain)), []

    def hook_all(model: nn.Module) -> None:
        for param in model.parameters():
            optimizer = torch.optim.SGD([param], lr=0.05, momentum=0.9)

            def stepped(param: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                calls.append(param.grad is not None)
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(stepped)

    for model in (plain, ours):
        hook_all(model)
        for seed in range(STEPS):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
    nonempty = sum(p.numel() > 0 for p in ours.parameters())
    at_least = STEPS * (len(list(plain.parameters())) + nonempty)
    gap = distance(full_state_dict(ours), dict(plain.state_dict()))
    return gap, sum(calls), at_least


def test_hooks_of_users_get_final_gradients():
    for gap, calls, at_least in dz.launch(step_inside_backward, 2, record=False):
        assert gap == 0 and calls >= at_least


def refusals() -> dict[str, str]:
    x, messages = torch.ones(2, WIDTH), {}
    torch.manual_seed(0)
    model = ZeRO3(Model())
    head, gain = model.module.head, model.module.blocks[1].gain
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_with(term: Callable[[], Any]) -> Callable[[], None]:
        return lambda: (model(x).sum() + term()).backward()

    def given() -> None:
        values = {
            n: torch.zeros(WIDTH, WIDTH) for n, p in model.named_parameters() if "weight" in n
        }
        torch.func.functional_call(model, values, (x,))

    def hook() -> None:
        handle = next(model.parameters()).register_hook(print)
        try:
            model(x)
        finally:
            handle.remove()

    def inputs() -> None:
        model(x).sum().backward(inputs=list(model.parameters()))
        optimizer.step()

    for name, program in {
        "norms": loss_with(lambda: sum(p.norm() for p in model.parameters())),
        "gain": loss_with(lambda: gain.sum()),
        "functional_call": given,
        "replaced": lambda: setattr(head, "weight", nn.Parameter(torch.ones(2, WIDTH))),
        "added": lambda: head.register_parameter("more", nn.Parameter(torch.ones(1))),
        "deleted": lambda: delattr(head, "weight"),
        "register_hook": hook,
        "inputs": inputs,
        "copied": lambda: copy.deepcopy(model.module.blocks[1].linear),
        "pickled": lambda: pickle.dumps(model.module),
    }.items():
        optimizer.zero_grad()
        messages[name] = raised(program)
        optimizer.zero_grad()
        model(x).sum().backward()  # nothing is left of it
    return messages


def test_hooks_that_would_be_lost_are_refused():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        module = Model()
        getattr(module.head.bias, register)(print)
        assert "head.bias has a gradient hook" in raised(ZeRO3, module)


def test_what_cannot_be_is_refused():
    for messages in dz.launch(refusals, 2, record=False):
        for name in ("norms", "gain"):
            assert "backward reached a shard of" in messages[name], messages
        for name in ("functional_call", "replaced", "added", "deleted"):
            assert "was set, replaced or removed after sharding" in messages[name], messages
        assert "shard of first.weight" in messages["register_hook"]
        assert "Fix: remove it" in messages["register_hook"]
        assert "it was backward(inputs=...), which does not know shards" in messages["inputs"]
        for name in ("copied", "pickled"):
            assert "cannot be copied" in messages[name]


# -- units


class Stages(nn.Module):
    """Lists of lists, and layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        rows = [nn.ModuleList(nn.Linear(4, 4) for _ in range(n)) for n in (1, 2)]
        self.stages = nn.ModuleList(rows)
        self.mixed = nn.ModuleList(
            [nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Embedding(4, 4)]
        )


class Named(nn.Module):
    """Blocks that are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down2(self.down1(x)))


def test_default_units_are_modules_that_are_called():
    assert list(split(Stages()))[1:] == [
        *("stages.0.0", "stages.1.0", "stages.1.1"),
        *("mixed.0", "mixed.1", "mixed.3"),
    ]
    assert list(split(Named()))[1:] == ["down1", "down2"]
    features = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4), Named()]
    assert list(split(nn.Sequential(*features)))[1:] == ["0", "2"]
    assert list(split(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))) == [""]
