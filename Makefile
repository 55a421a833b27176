# ddpz-lite: `make lab` opens the course, `make test` tests it. Needs Python 3.11+ with venv.
# Options:  PYTHON=python3.13 (which Python makes .venv)   TORCH=cuda (torch's build; the default is cpu)
#           WORKERS=4 (processes that run tests)            ARGS=... (more words for pytest, jupyter lab, ddpz)

PYTHON ?= python3
TORCH ?=
WORKERS ?= 4
ARGS ?=

# The environment's own commands come first, so that `!ddpz doctor` works in a notebook.
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
RUN := $(IN_VENV) .venv/bin/python -m
# JupyterLab refuses to start as root unless told so; in a container root is often the only user.
LAB_AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
# nbval runs the notebooks cell by cell, in the kernel of .venv and no other.
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=240 --nbval-kernel-startup-timeout=240 --color=no
TESTS := tests $(wildcard lessons solutions)
PYTEST = $(RUN) pytest -n $(WORKERS) --dist loadscope $(NBVAL)
export JUPYTER_PREFER_ENV_PATH = 1
# A run of the tests starts thousands of processes; each would compile the library for itself.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lab copies test test-rest test-all gpu bench-targets bench-growth lessons exercises course book lint lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-14s %s\n", $$1, $$2}'

# What .venv has to have: for a learner what the notebooks need, else that and the tests' and site's packages.
define environment
	@command -v $(PYTHON) >/dev/null || { echo "course: $(PYTHON) was not found. Fix: install Python 3.11 or newer, or name yours: make lab PYTHON=python3.13."; exit 1; }
	@$(PYTHON) .ci/environment.py $(if $(TORCH),--torch=$(TORCH)) $(1)
endef

setup:  ## create .venv and install everything (the other targets install first what they need)
	$(call environment)

lab: copies  ## open JupyterLab at your copy of lesson 00
	$(RUN) jupyterlab $(LAB_AS_ROOT) --LabApp.default_url=/lab/tree/my/lessons/00_start_here.ipynb $(ARGS)

copies:  ## your own copies of lessons and exercises in my/: make them, or bring them up to date
	$(call environment,--for lab)
	@$(IN_VENV) ddpz copies

test: setup  ## the tests and the lessons up to ZeRO-3: at most 8 minutes on two cores
	$(PYTEST) -m "not rest and not extra" $(ARGS) $(TESTS)

test-rest: setup  ## the other tests and lessons, and a browser
	$(PYTEST) -m "rest and not extra" $(ARGS) $(TESTS)

test-all: setup  ## both, and what repeats with other numbers: weekly, and before a release
	$(PYTEST) $(ARGS) $(TESTS)

# Installs nothing: it uses PYTHON if that was given, otherwise .venv's Python, otherwise python3.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard .venv/bin/python),$(PYTHON)),$(PYTHON))
GPU_RUN = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m
GPUS = $$($(GPU_PYTHON) -c "import torch; print(torch.cuda.device_count())")

gpu:  ## on a machine with NVIDIA GPUs: the tests marked gpu, the lessons, a step next to torch's own
	@$(GPU_PYTHON) -c "import torch, sys; sys.exit(not torch.cuda.is_available())" || { echo "gpu: $(GPU_PYTHON) has no torch that sees an NVIDIA GPU. Fix: make lab TORCH=cuda, or make gpu PYTHON=python3 with a Python that has one."; exit 1; }
	$(GPU_RUN) pytest -o addopts= -v -rs -m gpu tests/gpu
	$(GPU_RUN) ddpz_lite lessons --dir lessons
	$(GPU_RUN) ddpz_lite bench --peers --millions 100 --context 512 --batch 8 --ranks $(GPUS) $(ARGS)

bench-targets: setup  ## measure what users wait for, each next to its target (ARGS="start pages")
	cd tests && PATH="$(CURDIR)/.venv/bin:$$PATH" python -m bench targets $(ARGS)

bench-growth: setup  ## measure how time and memory grow (ARGS="ranks --figures ../book")
	cd tests && PATH="$(CURDIR)/.venv/bin:$$PATH" python -m bench growth $(ARGS)

lessons:  ## execute all lessons without a browser and show the time of each
	$(call environment,--for lab)
	$(IN_VENV) ddpz lessons $(ARGS)

exercises: setup  ## make the learners' copies in exercises/ from solutions/
	$(IN_VENV) ddpz exercises $(ARGS)

course: setup  ## write map, tables, sums and links from the notebooks' metadata
	$(IN_VENV) ddpz course $(ARGS)

book:  ## build the course as a static site in build/book/html
	$(call environment,--for lab book)
	$(IN_VENV) .venv/bin/python book/build.py $(ARGS)

lint: setup  ## check the style of code and notebooks
	$(RUN) ruff check .
	$(RUN) ruff format --check .

lock: setup  ## write requirements.lock anew from pyproject.toml
	$(PYTHON) .ci/environment.py lock

clean:  ## remove .venv and what the tools left behind
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
