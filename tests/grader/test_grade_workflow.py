"""The template for grading in CI: what runs a student's code there has nothing worth stealing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

SCHEMA = "vendor.github-workflows"


@pytest.fixture
def workflow(root):
    text = (root / ".github" / "workflows" / "grade.yml").read_text()
    return yaml.safe_load(text.replace("\non:", '\n"on":'))


def test_its_token_may_only_read_and_it_has_no_secrets(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["permissions"] == {"contents": "read"} for job in workflow["jobs"].values())
    assert "secrets" not in json.dumps(workflow)
    assert list(workflow["on"]) == ["workflow_call"] and "secrets" not in workflow["on"]


def test_no_credentials_stay_in_a_checkout(workflow):
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) == 2
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_no_word_of_a_student_is_part_of_a_command(workflow):
    runs = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    assert not [run for run in runs if "${{" in run]
    assert any("ddpz grade" in run and "--secure" in run for run in runs)


def test_every_job_has_a_deadline(workflow):
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())


def test_its_comment_calls_it_with_inputs_that_it_has(root, workflow):
    text = (root / ".github" / "workflows" / "grade.yml").read_text()
    lines = [line[6:] for line in text.splitlines() if line.startswith("#     ")]
    caller = yaml.safe_load("\n".join(lines).replace("on:", '"on":', 1))
    (job,) = caller["jobs"].values()
    assert re.fullmatch(r"\S+/\.github/workflows/grade\.yml@\w+", job["uses"])
    inputs = workflow["on"]["workflow_call"]["inputs"]
    assert set(job["with"]) <= set(inputs)
    assert {name for name, about in inputs.items() if about.get("required")} <= set(job["with"])


@pytest.mark.skipif(
    shutil.which("check-jsonschema") is None, reason="check-jsonschema is not installed"
)
def test_all_workflows_have_the_form_of_the_schema(root):
    files = sorted((root / ".github" / "workflows").glob("*.yml"))
    command = ["check-jsonschema", "--builtin-schema", SCHEMA, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
