"""Makes the course's environment: .venv with the exact versions of requirements.lock.

The Makefile calls this file with whatever `python3` the machine has, before anything is installed.
So it needs the standard library only, and it says what is missing in one line with the fix.
A second run finds the stamp of the first and does nothing.

    python3 .ci/environment.py            make or refresh .venv, with all extras of pyproject.toml
    python3 .ci/environment.py --for lab  with those that the notebooks need, and what is there
    python3 .ci/environment.py lock       write requirements.lock anew from pyproject.toml
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "course.json"
EXTRAS = ("lab", "book", "test")

OLDEST, NEWEST = (3, 11), (3, 14)  # what the locked torch has builds for
UV = "uv==0.13.8"
GB_NEEDED = {"cpu": 3, "cuda": 12}  # torch's CUDA libraries are most of the second
# What a first installation downloads, measured on Linux with torch 2.13: the CPU build of torch is
# 190 MB of it; a CUDA build and its libraries are about 3 GB more.
MB_TO_DOWNLOAD = {"lab": 300, "all": 400}
CUDA_LIBRARIES = ("nvidia-", "cuda-", "triton")  # torch names its own; the lock leaves them out

# JupyterLab asks every new user about news from the network; a course needs no such question.
LAB_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}
}


def stop(problem, fix):
    """End with one line: what is missing, and what to do about it."""
    sys.exit(f"course: {problem}. Fix: {fix}.")


def say(text):
    print(f"course: {text}", flush=True)


def check_python(version=sys.version_info):
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    found = next((name for name in names if shutil.which(name) and starts(name)), None)
    fix = f"make lab PYTHON={found or 'python3.13'}"
    if not found:
        fix = f"install Python 3.13, then {fix}"
    wanted = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    stop(f"this is Python {version[0]}.{version[1]} and the course needs {wanted}", fix)


def starts(python):
    """Whether it runs: version managers put names on the path for Pythons that are not chosen."""
    return run(python, "-c", "", quiet=True).returncode == 0


def check_venv_module():
    try:
        import ensurepip  # noqa: F401  (Debian ships Python without it)
        import venv  # noqa: F401
    except ImportError as error:
        minor = f"python3.{sys.version_info[1]}"
        stop(
            f"this Python cannot make virtual environments (no module {error.name})",
            f"on Debian and Ubuntu, sudo apt install {minor}-venv; elsewhere, a full Python",
        )


def check_disk(torch):
    needed = GB_NEEDED["cpu" if torch == "cpu" else "cuda"]
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < needed:
        stop(
            f"{free:.1f} GB free where the course lies, and the installation needs {needed} GB",
            "free some space or move the course to a larger disk",
        )


def requirements(extras):
    """What pyproject.toml asks for; the lock says in which versions."""
    import tomllib  # an older Python has been told so by now

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return sum((optional[extra] for extra in extras), project["dependencies"])


def fingerprint(torch, extras):
    """What the environment was made from: if any of it changes, it is made again."""
    inputs = LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    return {
        "inputs": hashlib.sha256(inputs).hexdigest(),
        "python": sys.version.split()[0],
        "folder": str(VENV),  # a moved environment has wrong paths in its scripts
        "torch": torch,
        "extras": extras,
    }


def read_stamp():
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}  # none yet, or an installation that was interrupted


def run(*command, quiet=False, **options):
    """Run a command and return the finished process. `quiet` keeps its output for the caller."""
    if quiet:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.run([str(part) for part in command], **options)


def install(torch, extras, changed):
    """uv first, for it can choose torch's build; plain pip where uv finds no way."""
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check"]
    if changed:
        run(*pip, "uninstall", "--quiet", "--yes", "torch")  # same version, other build
    backend = {"cuda": "auto"}.get(torch, torch)
    uv = [PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON]
    locked = ["--constraint", LOCK, *requirements(extras)]
    uv += [f"--torch-backend={backend}", *locked]
    environment = {"UV_HTTP_RETRIES": "1", "UV_PYTHON_DOWNLOADS": "never", **os.environ}
    quiet = [] if sys.stdout.isatty() else ["-qq"]  # a log needs errors only

    found_uv = run(*pip, "install", "--quiet", UV, quiet=True).returncode == 0
    if found_uv and run(*uv, "--dry-run", quiet=True, env=environment).returncode == 0:
        done = run(*uv, *quiet, env=environment)
    else:
        say(f"uv cannot reach torch's {torch} builds here: pip installs the build that it finds")
        done = run(*pip, "install", *quiet, *locked)
    if done.returncode == 0:  # the course itself, in place: an edit counts at once
        own = ["--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT]
        done = run(*pip, "install", *own)
    if done.returncode != 0:
        check_disk("cpu")
        stop("the installation failed, as said above", "check the network, then the same command")


def report_build(torch):
    ask = "import torch; print(torch.__version__, torch.version.cuda or torch.version.hip or 'CPU')"
    answer = run(PYTHON, "-c", ask, quiet=True, text=True)
    if answer.returncode != 0:
        last = answer.stdout.strip().splitlines()[-1]
        stop(f"torch was installed but does not start: {last}", "make clean, then again")
    version, build = answer.stdout.split()[-2:]
    note = ""
    if torch == "cpu" and build != "CPU":
        note = " (a GPU build: larger than asked for, and right on a CPU too)"
    if torch != "cpu" and build == "CPU":
        note = f" (asked for {torch}, but no driver for it was found)"
    say(f"torch {version}, build {build}{note}")


def to_download(torch, extras):
    """What the user is about to wait for, in a sentence."""
    if torch != "cpu":
        return "downloads several GB, most of it torch's CUDA libraries"
    megabytes = MB_TO_DOWNLOAD["lab" if set(extras) == {"lab"} else "all"]
    return f"downloads up to {megabytes} MB, 190 of it torch; later calls start at once"


def make_environment(torch=None, extras=EXTRAS):
    """Bring .venv to what lock, Python and `torch` ask for; `None` keeps torch's build.

    extras: those of pyproject.toml that are needed; what was installed before stays.
    """
    check_python()
    stamp = read_stamp()
    torch = torch or stamp.get("torch", "cpu")
    extras = sorted({*extras, *stamp.get("extras", ())})
    wanted = fingerprint(torch, extras)
    if stamp == wanted and PYTHON.exists():
        return
    check_venv_module()
    check_disk(torch)
    STAMP.unlink(missing_ok=True)  # from here until the end, .venv is unfinished
    moved = any(stamp.get(key) != wanted[key] for key in ("python", "folder"))
    if moved or not PYTHON.exists():
        say(f"creating .venv with Python {wanted['python']}")
        made = run(sys.executable, "-m", "venv", "--clear", VENV, quiet=True, text=True)
        if made.returncode != 0:
            stop(f".venv could not be made: {made.stdout.strip().splitlines()[-1]}", "make clean")
    say(f"installing for {', '.join(extras)}: {to_download(torch, extras)}")
    install(torch, extras, changed=stamp.get("torch", torch) != torch)
    report_build(torch)
    fonts = "import matplotlib.font_manager"  # it lists the machine's fonts once, which takes time
    run(PYTHON, "-c", fonts, quiet=True)
    overrides = VENV / "share/jupyter/lab/settings/overrides.json"
    overrides.parent.mkdir(parents=True, exist_ok=True)
    overrides.write_text(json.dumps(LAB_SETTINGS, indent=2) + "\n")
    STAMP.write_text(json.dumps(wanted, indent=2) + "\n")


def write_lock():
    """Pins for every Python and system that the course serves; the pins in the file are kept."""
    compile_lock = [PYTHON, "-m", "uv", "pip", "compile", "pyproject.toml", "--all-extras"]
    compile_lock += ["--universal", "--fork-strategy=fewest", "--no-annotate", "--quiet"]
    compile_lock += [f"--python-version={OLDEST[0]}.{OLDEST[1]}"]
    compile_lock += ["--custom-compile-command=make lock"]
    if run(*compile_lock, "--output-file", LOCK, cwd=ROOT).returncode != 0:
        stop("uv found no set of versions, as said above", "widen the range that it names")
    lines = LOCK.read_text().splitlines(keepends=True)
    LOCK.write_text("".join(line for line in lines if not line.startswith(CUDA_LIBRARIES)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the course's environment in .venv.")
    parser.add_argument("action", nargs="?", default="make", choices=["make", "lock"])
    parser.add_argument("--torch", help="cpu (at first), cuda, or a build that uv knows")
    parser.add_argument("--for", dest="extras", nargs="+", default=EXTRAS, choices=EXTRAS)
    options = parser.parse_args()
    if options.action == "lock":
        write_lock()
    else:
        make_environment(options.torch, options.extras)
