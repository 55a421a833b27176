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


def steps_of(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_its_token_may_only_read_and_its_secret_only_checks_the_course_out(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["permissions"] == {"contents": "read"} for job in workflow["jobs"].values())
    (secret,) = workflow["on"]["workflow_call"]["secrets"]
    assert secret == "course-token" and list(workflow["on"]) == ["workflow_call"]
    used = [step for step in steps_of(workflow) if "secrets." in json.dumps(step)]
    (checkout,) = used
    assert checkout["with"]["repository"] == "${{ inputs.course }}"
    assert checkout["with"]["token"] == "${{ secrets.course-token || github.token }}"


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


def grading(workflow) -> str:
    (run,) = (s["run"] for s in steps_of(workflow) if "ddpz grade" in s.get("run", ""))
    return run


@pytest.mark.parametrize(
    ("only", "least", "words"),
    [
        ("", "", []),
        ("03", "100%", ["--only", "03", "--fail-under", "100%"]),
        ("03.a $(x) 05", "12", ["--only", "03.a", "$(x)", "05", "--fail-under", "12"]),
    ],
)
def test_its_inputs_are_words_of_the_command(workflow, tmp_path, only, least, words):
    """The step as bash runs it, with a stand-in that prints its words."""
    (tmp_path / "course/.venv/bin").mkdir(parents=True)
    stand_in = tmp_path / "course/.venv/bin/ddpz"
    stand_in.write_text('#!/bin/sh\nfor word; do echo "$word"; done; exit 1\n')
    stand_in.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "FOLDER": "../a b", "ONLY": only, "LEAST": least}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", grading(workflow)]
    done = subprocess.run(command, cwd=tmp_path / "course", env=env, capture_output=True, text=True)
    assert done.returncode == 1, "as the grader ends, so does the step"
    assert done.stdout == "", "what the grader prints has the seed"
    common = ["grade", "../a b", "--out", "../grades", "--secure"]
    assert (tmp_path / "grade.log").read_text().splitlines() == [*common, *words]


def test_a_student_sees_their_feedback_and_nothing_of_the_teacher_s(workflow):
    text = json.dumps(steps_of(workflow))
    assert "cat grades/students/*/feedback.md >> " in text and "GITHUB_STEP_SUMMARY" in text
    assert "summary.md" not in text and "gradebook" not in text
    (kept,) = (s for s in steps_of(workflow) if s.get("uses", "").startswith("actions/upload"))
    assert kept["with"]["path"] == "grades/students"


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
