"""`deploy/`: a job over two hosts, the death of one of them, and how a cluster starts it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hosts import ROOT, Host, missing, two_hosts
from test_train_faults import recipe_of, words
from train_state import assert_same, state

import ddpz_lite as dz
from ddpz_lite.strategies.costs import elements_moved
from ddpz_lite.trainer.loop import train
from ddpz_lite.trainer.recipe import Recipe

pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("own_temporary")]

NODE = "deploy/node.sh"
RANK = Path(__file__).with_name("ranks_of_two_hosts.py")
DEADLINE = 400.0  # seconds
needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing() or "two hosts")


def start(hosts: Sequence[Host], node: int, command: Sequence[str], **environ: str):
    job = {"HEAD": hosts[0].address, "NODES": str(len(hosts)), "NODE": str(node), "RANKS": "1"}
    return hosts[node].start([NODE, *command], job | environ)


def output(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=DEADLINE)[0]


def uninterrupted(recipe: Recipe) -> None:
    train(recipe)


# A minute by nature. In every `make test` lesson 16 kills one of two nodes without a cable.
@pytest.mark.extra
@needs_hosts
def test_a_host_dies_and_what_is_left_ends_as_if_it_had_not(tmp_path):
    """ZeRO-3 over two hosts, one rank on each; then both ranks on the one that is left."""
    recipe = recipe_of(tmp_path, steps=200, stage=3, width=16, report=1, validate=0, sample=0)
    command = ["-m", "ddpz_lite", *words(recipe, tmp_path / "runs")]
    with two_hosts() as hosts:
        first, second = (start(hosts, node, command, RESTARTS="0") for node in range(2))
        printed = ""
        while "step 20/200" not in printed:
            line = first.stdout.readline()
            assert line, printed
            printed += line
        hosts[1].end()  # the machine is gone: no process of it says goodbye
        printed += output(first)
        assert first.returncode != 0 and "ZeRO-3 on 2 ranks over gloo" in printed
        second.communicate(timeout=DEADLINE)
        alone = start(hosts[:1], 0, command, RANKS="2")
        went_on = output(alone)
        assert alone.returncode == 0, went_on
        assert int(re.search(r"resumed at step (\d+) of 200", went_on)[1]) >= 10
    uninterrupted_run = replace(recipe, checkpoint=str(tmp_path / "whole"))
    dz.launch(uninterrupted, 2, args=(uninterrupted_run,), record=False)
    end = "step-00000200"
    assert_same(state(recipe, tmp_path / "runs" / end), state(recipe, tmp_path / "whole" / end))


@pytest.mark.extra
@needs_hosts
def test_what_crosses_the_cable_is_what_the_formula_says():
    """Bytes of ZeRO-3 in 20 steps, by the cable's own counter, less those of none."""
    sent = {}
    with two_hosts() as hosts:
        for steps in (2, 22):
            before = hosts[0].bytes_sent()
            both = [start(hosts, n, [str(RANK), str(steps)]) for n in range(2)]
            printed = [output(process) for process in both]
            assert [process.returncode for process in both] == [0, 0], printed
            sent[steps] = hosts[0].bytes_sent() - before
    parameters = int(re.search(r"parameters (\d+)", printed[0])[1])
    bytes_of_a_step = 4 * elements_moved(parameters, 2, stage=3)
    assert (sent[22] - sent[2]) / 20 == pytest.approx(bytes_of_a_step, rel=0.08)  # and headers


@needs_hosts
def test_who_waits_says_where_and_for_how_many():
    with two_hosts() as hosts:
        first = start(hosts, 0, [str(RANK), "1"], WAIT="2")
        printed = output(first)
        here = hosts[0].address
    assert f"node 0 of 2 ({here}, cable0) joins at {here}:29500, job ddpz" in printed
    assert first.returncode != 0 and "RendezvousTimeoutError" in printed


# ---- SLURM ----


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


SLURM = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def no_slurm() -> str:
    for program, package in {
        "slurmctld": "slurm-wlm",
        "slurmd": "slurm-wlm",
        "munged": "munge",
    }.items():
        if not shutil.which(program):
            return f"needs {program}, of the package {package}"
    return "" if os.getuid() == 0 else "slurmd wants to be root"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """SLURM with two nodes, which are both this machine; its commands' environment."""
    host, environ = socket.gethostname().partition(".")[0], os.environ.copy()
    environ |= {"SLURM_CONF": f"{folder}/slurm.conf"}
    key, started = folder / "key", []
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for name in ("state", "spool-node0", "spool-node1"):
        (folder / name).mkdir()
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(
        SLURM.format(host=host, ports=ports, folder=folder, user="root").lstrip()
    )

    def serve(*command: str) -> None:
        with (folder / f"{Path(command[0]).name}-{len(started)}.out").open("w") as log:
            started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))

    try:
        serve(
            shutil.which("munged"), "--foreground", "--force", f"--socket={folder}/munge",
            f"--key-file={key}", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed",
        )  # fmt: skip
        wait_for(lambda: (folder / "munge").exists())
        serve(shutil.which("slurmctld"), "-D", "-f", environ["SLURM_CONF"])
        for node in ("node0", "node1"):
            serve(shutil.which("slurmd"), "-D", "-N", node, "-f", environ["SLURM_CONF"])
        wait_for(lambda: "2 idle" in stdout_of(["sinfo", "-h", "-o", "%D %t"], environ))
        yield environ
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(DEADLINE / 4)


def stdout_of(command: Sequence[str], environ: dict[str, str]) -> str:
    return subprocess.run(command, env=environ, capture_output=True, text=True).stdout


def wait_for(true) -> None:
    end = time.monotonic() + DEADLINE / 4
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.extra
@pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "SLURM")
def test_slurm_trains_on_two_nodes(tmp_path):
    recipe = recipe_of(tmp_path, steps=4, stage=3, validate=0, sample=0)
    runs = tmp_path / "runs"
    with cluster(tmp_path) as environ:
        environ |= {"HEAD": "127.0.0.1", "RANKS": "1", "PYTHON": sys.executable}
        done = subprocess.run(
            ["sbatch", "--wait", f"--output={tmp_path}/out", "deploy/train.sbatch",
             *words(recipe, runs)[1:]],
            cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip
        printed = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else done.stderr
    assert done.returncode == 0, printed
    assert "ZeRO-3 on 2 ranks over gloo" in printed and (runs / "step-00000004").is_dir()


# ---- Kubernetes ----


def manifest() -> tuple[dict, dict]:
    """The service and the job."""
    service, job = yaml.safe_load_all((ROOT / "deploy" / "train-job.yaml").read_text())
    return service, job


@pytest.mark.extra
@needs_hosts
def test_what_the_pods_run_trains_on_two_hosts_that_know_each_other_by_name(tmp_path):
    """Its command, words and variables; a folder is the volume, and the cluster sets NODE."""
    _, job = manifest()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (volume,) = (v for v in container["volumeMounts"] if v["name"] == "runs")
    command = container["command"] + [
        word.replace(volume["mountPath"], str(tmp_path)) for word in container["args"]
    ]
    environ = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    with two_hosts("ddpz-0.ddpz", "ddpz-1.ddpz") as hosts:
        pods = [host.start(command, environ | {"NODE": str(n)}) for n, host in enumerate(hosts)]
        printed = ""
        while "step 10/1000" not in printed:
            line = pods[0].stdout.readline()
            assert line, printed
            printed += line
        for host in hosts:
            host.end()
        printed += "".join(output(pod) for pod in pods)
    assert "node 1 of 2 (10.77.0.2, cable1) joins at ddpz-0.ddpz:29500" in printed
    assert "ZeRO-3 on 4 ranks over gloo" in printed


@pytest.mark.extra
def test_the_manifest_is_valid_and_each_pod_is_a_node():
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    service, job = manifest()
    for document in (service, job):
        kubernetes.validate(document, kubernetes.latest_version(), strict=True)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environ = {entry["name"]: entry.get("value") for entry in container["env"]}
    name = job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert environ["NODES"] == str(spec["completions"])
    assert environ["HEAD"] == f"{name}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert container["command"] == [NODE]
