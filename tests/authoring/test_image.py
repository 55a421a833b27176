"""The Dockerfile, and what uses it. No daemon runs here, so no image is built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.M)


def test_the_image_has_what_its_steps_and_the_job_run():
    """`COPY . .` brings what git tracks and .dockerignore does not name."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    ignored = set((ROOT / ".dockerignore").read_text().split())
    copied = {name for name in tracked if name.split("/")[0] not in ignored}
    (script,) = re.findall(r"python (\S+) --torch", DOCKERFILE)
    _, job = yaml.safe_load_all((ROOT / "deploy/train-job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {script, "Makefile", "requirements.lock", *container["command"]} <= copied
    assert container["image"].split(":")[0] in DOCKERFILE.splitlines()[0].split()


def test_the_installer_takes_the_arguments_of_the_image():
    (step,) = [run for run in instructions("RUN") if "environment.py" in run]
    words = step.replace("$TORCH", instructions("ARG")[0].split("=")[1]).split()
    shown = subprocess.run(
        [sys.executable, *words[1:], "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr


def test_the_development_container_builds_a_stage_that_is_there():
    made = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["build"]
    assert (ROOT / ".devcontainer" / made["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert f"AS {made['target']}" in DOCKERFILE
