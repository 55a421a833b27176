"""The set-up: one set of versions in all its files, and one line for what is missing."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import namedtuple
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"pytorch-cpu": "torch"}  # conda's name of a package: PyPI's
IMPORT_NAMES = {"PIL": "pillow"}


def runs(workflow: str) -> list[str]:
    """The commands of a workflow, in order."""
    read = yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text())
    return [step["run"] for job in read["jobs"].values() for step in job["steps"] if "run" in step]


def lock() -> dict[str, Requirement]:
    """Canonical name: pinned requirement."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def version(pin: Requirement) -> str:
    return str(pin.specifier).removeprefix("==")


def direct() -> list[Requirement]:
    extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
    return [Requirement(text) for text in (*PROJECT["dependencies"], *extras)]


# ---- one set of versions ----


def test_the_lock_pins_every_direct_dependency_inside_its_range():
    pins = lock()
    for wanted in direct():
        pin = pins[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version(pin)), f"{wanted} and {pin}"
        assert pin.marker is None, f"{pin} is not installed everywhere"


def test_the_lock_chooses_no_build_of_torch():
    assert version(lock()["torch"]) == "2.13.0"
    assert not [name for name in lock() if name.startswith(("nvidia", "cuda", "triton"))]


def test_environment_yml_has_the_versions_of_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, last = environment["dependencies"]
    assert last == {"pip": ["-r requirements.lock", "-e ."]}
    pins, compared = lock(), set()
    for line in conda:
        name, _, wanted = line.partition("=")
        if name == "python":
            assert SpecifierSet(PROJECT["requires-python"]).contains(wanted)
        elif name != "pip":
            package = CONDA_NAMES.get(name, name)
            assert wanted == version(pins[package]), line
            compared.add(package)
    assert compared == {"torch", "numpy"}


@pytest.mark.skipif(
    Path(sys.prefix).resolve() != ROOT / ".venv",
    reason="these tests run in another environment than the course's .venv",
)
def test_installed_versions_are_those_of_the_lock():
    differing = {}
    for name, pin in lock().items():
        if pin.marker is None or pin.marker.evaluate():
            installed = importlib.metadata.version(name).partition("+")[0]  # 2.13.0+cpu
            if installed != version(pin):
                differing[name] = (installed, version(pin))
    assert differing == {}


def test_every_import_of_the_library_is_a_declared_dependency():
    declared = {canonicalize_name(wanted.name) for wanted in direct()}
    # IPython comes with ipykernel, which is declared; DeepSpeed is measured only where it is there.
    known = {*sys.stdlib_module_names, "ddpz_lite", "IPython", "deepspeed"}
    undeclared = set()
    for path in (ROOT / "ddpz_lite").rglob("*.py"):
        for name in imports(ast.parse(path.read_text())) - known:
            if canonicalize_name(IMPORT_NAMES.get(name, name)) not in declared:
                undeclared.add(f"{path.relative_to(ROOT)} imports {name}")
    assert undeclared == set()


def imports(tree: ast.AST) -> set[str]:
    """The top-level packages that a module imports, by statement or by `need("name")`."""
    names = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(level=0):
                names.append(node.module)
            case ast.Call(func=ast.Name(id="need"), args=[ast.Constant(value=name)]):
                names.append(name)
    return {name.partition(".")[0] for name in names}


# ---- the same commands everywhere ----


def test_ci_runs_both_targets_to_their_end_and_fails_where_one_did(tmp_path):
    """In a folder whose targets print their names. What CI would install is there."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text("%:\n\t@echo $@; test $@ != $(FAILS)\n")
    for name in ("chromium", "ip"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for fails in ("none", "test", "test-rest"):
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails}
        command = [tmp_path / ".ci/run"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == ["setup", "test", "test-rest"], done.stderr
        assert (done.returncode == 0) == (fails == "none")


def test_the_example_of_the_readme_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    (tmp_path / "example.py").write_text(code)
    command = [sys.executable, "example.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[10.0, 10.0, 10.0, 10.0]", "6 MB sent by rank 0"]


def test_the_tests_that_a_workflow_leaves_out_are_there():
    """A path that has moved would deselect nothing, and the job would fail for another reason."""
    deselected = re.findall(r"--deselect (\S+?)::(\w+)", "\n".join(runs("newest-torch")))
    assert deselected
    for path, name in deselected:
        assert f"def {name}(" in (ROOT / path).read_text()


# ---- .ci/environment.py: what is missing, and not doing things twice ----


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The set-up script as a module, on a small project, with its commands recorded."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci/environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    venv = tmp_path / ".venv"
    paths = {"ROOT": tmp_path, "VENV": venv, "PYTHON": venv / "bin/python"}
    paths |= {"LOCK": tmp_path / "requirements.lock", "STAMP": venv / "course.json"}
    for name, path in paths.items():
        monkeypatch.setattr(module, name, path)
    module.commands = []
    module.fail = lambda words: False

    def run(*command, quiet=False, **options):
        words = " ".join(str(part) for part in command)
        module.commands.append(words)
        if "-m venv" in words:
            (venv / "bin").mkdir(parents=True, exist_ok=True)
            (venv / "bin/python").touch()
        status = 1 if module.fail(words) else 0
        return SimpleNamespace(returncode=status, stdout="a line\n2.13.0+cpu CPU")

    monkeypatch.setattr(module, "run", run)
    return module


def only_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and text.startswith("course: ") and "Fix: " in text
    return text


def test_an_old_python_gets_the_name_of_the_newer_one(environment, monkeypatch):
    monkeypatch.setattr(
        environment.shutil, "which", lambda name: name if name == "python3.12" else None
    )
    with pytest.raises(SystemExit) as error:
        environment.check_python((3, 9, 18))
    assert only_line(error).endswith("Fix: make lab PYTHON=python3.12.")


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 15, 0)])
def test_a_python_out_of_range_gets_what_to_install(environment, monkeypatch, version):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as error:
        environment.check_python(version)
    assert "3.11 to 3.14" in only_line(error) and "install Python 3.13" in only_line(error)


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv_gets_the_package(environment, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as error:
        environment.make_environment()
    assert f"no module {module}" in only_line(error)
    assert f"python3.{sys.version_info[1]}-venv" in only_line(error)


def test_a_full_disk_stops_before_anything_is_installed(environment, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage(100, 99, 2e9))
    with pytest.raises(SystemExit) as error:
        environment.make_environment()
    assert "2.0 GB free" in only_line(error) and "needs 3 GB" in only_line(error)
    with pytest.raises(SystemExit) as error:
        environment.make_environment("cuda")
    assert "needs 12 GB" in only_line(error)
    assert environment.commands == []


def test_the_first_run_installs_and_the_second_does_nothing(environment):
    environment.make_environment()
    assert any("-m venv" in words for words in environment.commands)
    assert any("--torch-backend=cpu" in words for words in environment.commands)
    assert json.loads(environment.STAMP.read_text())["torch"] == "cpu"
    environment.commands.clear()
    environment.make_environment()
    assert environment.commands == []


def test_the_notebooks_need_less_than_the_tests_and_nothing_is_installed_twice(environment):
    def installed():
        (words,) = (w for w in environment.commands if "-m uv" in w and "--dry-run" not in w)
        environment.commands.clear()
        asked = words.split("requirements.lock ")[1].removesuffix(" -qq").split()
        return {Requirement(word).name for word in asked}

    extras = PROJECT["optional-dependencies"]
    least = {Requirement(text).name for text in (*PROJECT["dependencies"], *extras["lab"])}
    environment.make_environment(extras=["lab"])
    assert installed() == least
    environment.make_environment()
    assert installed() == {wanted.name for wanted in direct()} > least
    environment.make_environment(extras=["lab"])  # all is there
    assert environment.commands == []


@pytest.mark.parametrize(
    ("target", "extras"), [("copies", "--for lab"), ("test", ""), ("book", "--for lab book")]
)
def test_a_target_installs_what_it_needs(target, extras):
    command = ["make", "--no-print-directory", "-n", target, "TORCH="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (asked,) = (line for line in done.stdout.splitlines() if ".ci/environment.py" in line)
    assert asked.partition(".ci/environment.py")[2].strip() == extras


def test_a_changed_lock_installs_again_in_the_same_venv(environment):
    environment.make_environment()
    environment.commands.clear()
    environment.LOCK.write_text(environment.LOCK.read_text() + "one-more==1.0\n")
    environment.make_environment()
    assert environment.commands and not any("-m venv" in words for words in environment.commands)


def test_an_interrupted_installation_is_not_taken_for_a_finished_one(environment):
    environment.make_environment()
    environment.fail = lambda words: "--editable" in words
    environment.LOCK.write_text(environment.LOCK.read_text() + "one-more==1.0\n")
    with pytest.raises(SystemExit) as error:
        environment.make_environment()
    assert "the installation failed" in only_line(error)
    assert not environment.STAMP.exists()


def test_a_moved_project_gets_a_new_venv(environment):
    environment.make_environment()
    stamp = json.loads(environment.STAMP.read_text())
    environment.STAMP.write_text(json.dumps({**stamp, "folder": "somewhere else"}))
    environment.commands.clear()
    environment.make_environment()
    assert any("-m venv --clear" in words for words in environment.commands)


def test_another_build_of_torch_replaces_the_first_and_stays(environment):
    environment.make_environment()
    environment.commands.clear()
    environment.make_environment("cuda")
    assert any("uninstall" in words and "torch" in words for words in environment.commands)
    assert any("--torch-backend=auto" in words for words in environment.commands)
    environment.commands.clear()
    environment.make_environment()  # asked for nothing: keeps what is there
    assert environment.commands == []


def test_without_torch_builds_for_uv_pip_installs_and_says_so(environment, capsys):
    environment.fail = lambda words: "--dry-run" in words
    environment.make_environment()
    assert "uv cannot reach torch's cpu builds" in capsys.readouterr().out
    assert any(re.search(r"-m pip .*--constraint", words) for words in environment.commands)
