"""Ready-made strategies are not to be had while an answer runs, and all else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.rest

SETUP = """
import importlib, os, sys
import torch, torch.distributed as dist
from ddpz_lite.course.check.guard import ReadyMade, own_work
model = torch.nn.Linear(2, 2)

def ready_made():
    yield lambda: torch.nn.parallel.DistributedDataParallel(model)
    yield lambda: fsdp().fully_shard(torch.nn.Linear(2, 2))
    yield lambda: fsdp().FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id="cpu")
    yield lambda: parallel("pipelining").PipelineStage(model, 0, 1, torch.device("cpu"))
    yield lambda: parallel("tensor.parallel").parallelize_module(model, mesh(), {})
    yield lambda: zero1().ZeRO1(model.parameters(), torch.optim.SGD)

def mesh():
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,))

def parallel(name):
    return importlib.import_module(f"torch.distributed.{name}")

def zero1():
    import ddpz_lite.strategies.zero1
    return ddpz_lite.strategies.zero1

def fsdp():
    import torch.distributed.fsdp
    return torch.distributed.fsdp

def all_refused():
    for make in ready_made():
        try:
            make()
        except ReadyMade as error:
            assert "asks you to build" in str(error)
        else:
            raise AssertionError("not refused")
"""
CASES = {
    "an optimizer, which imports FSDP itself": """
        assert "torch._dynamo" not in sys.modules
        with own_work():
            torch.optim.SGD(model.parameters(), lr=0.1)
            all_refused()
        assert "torch.distributed.fsdp" in sys.modules
    """,
    "nothing imported before": """
        with own_work():
            all_refused()
    """,
    "all imported before": """
        import torch.distributed.fsdp, ddpz_lite.strategies.zero1
        with own_work():
            all_refused()
    """,
    "of this library all that is in strategies/, also what is added later": """
        import inspect
        import ddpz_lite.strategies as room
        from ddpz_lite.data import RankSampler
        LATER = 'class Later: pass\\n\\ndef shard(): pass\\n\\nclass _Own: pass\\n'
        room.__path__.append(os.environ["LATER"])
        for name in ("later", "latest"):
            with open(f"{room.__path__[-1]}/{name}.py", "w") as file:
                file.write(LATER)
        from ddpz_lite.checkpoint import save_load
        from ddpz_lite.strategies import later, units, zero3
        def refuses(make):
            try:
                make()
            except ReadyMade:
                return True
        def public(module):
            own = [name for name in vars(module) if not name.startswith("_")]
            made = [n for n in own if inspect.isroutine(v := vars(module)[n]) or type(v) is type]
            return [n for n in made if vars(module)[n].__module__ == module.__name__]
        named = {module: public(module) for module in (later, save_load, units, zero3)}
        assert all(named.values())
        with own_work():
            for module, names in named.items():
                assert all(refuses(vars(module)[name]) for name in names), (module, names)
            later._Own()
            assert refuses(lambda: importlib.import_module("ddpz_lite.strategies.latest"))
        later.Later(), later.shard(), importlib.import_module("ddpz_lite.strategies.latest").Later()
    """,
    "what a lesson builds, for its second notebook": """
        from ddpz_lite.course.built import lesson05, lesson11
        with own_work():
            for make in (lambda: lesson05.MyDDP(model), lambda: lesson11.make_unit("all", [])):
                try:
                    make()
                except ReadyMade:
                    continue
                raise AssertionError("not refused")
    """,
    "and afterwards they are": """
        with own_work():
            torch.optim.SGD(model.parameters(), lr=0.1)
        for make in ready_made():
            make()
        assert not any(type(finder).__name__ == "_Refuse" for finder in sys.meta_path)
    """,
}


FORKS = """
for name, program in json.loads(sys.stdin.read()).items():
    pid = os.fork()
    if not pid:
        try:
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
            exec(compile(program, name, "exec"), globals())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sep=": ", flush=True)
"""


def test_each_case_in_its_own_process(tmp_path):
    """Forked from one that has imported torch, and has no threads yet."""
    programs = {name: textwrap.dedent(case) for name, case in CASES.items()}
    done = subprocess.run(
        [sys.executable, "-c", "import json, traceback\n" + SETUP + FORKS],
        input=json.dumps(programs),
        env={**os.environ, "LATER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.splitlines() == [f"{name}: 0" for name in CASES], done.stderr
