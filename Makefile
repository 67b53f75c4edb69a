# `make run` and `make test` work from a fresh clone. DEVICE=cpu leaves out the machine's GPUs.
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3
GPUS := $(shell $(PYTHON) dlrm_sharded/ranks/gpus.py)
DEVICE ?= $(or $(DLRM_SHARDED_DEVICE),$(if $(GPUS),cuda,cpu))
# If torch cannot use the GPUs, ranks end with an error; they do not fall back to the CPU.
export DLRM_SHARDED_DEVICE := $(DEVICE)
REQUIREMENTS ?= requirements/$(DEVICE).txt
# Every set of versions has its own environment: .venv-cpu, .venv-cuda-2.11.
VENV := .venv-$(basename $(notdir $(REQUIREMENTS)))
BIN := $(VENV)/bin

# Without NPROC, runs of a sweep have the ranks of their experiment, or else one per GPU, or two.
SWEEP_RANKS := $(if $(NPROC),hydra.launcher.j=1x$(NPROC))
ifeq ($(DEVICE),cuda)
NPROC ?= $(words $(or $(GPUS),none))
# The demo for the CPU is so small that on a GPU all plans take equally long.
DEMO := experiment=gpu_demo
else
NPROC ?= 2
export CUDA_VISIBLE_DEVICES :=
endif
CORES := $(shell getconf _NPROCESSORS_ONLN)
# Too many threads cost far more than too few.
export OMP_NUM_THREADS ?= $(shell n=$$(( $(CORES) / $(NPROC) )); echo $$(( n > 0 ? n : 1 )))

.PHONY: run install sweep calibrate test test-all check lint unit tensorboard benchmark soak docs help clean
run: $(VENV)/installed  ## train once; ARGS="sharder=dim batch_size=8192"
	$(BIN)/python -m dlrm_sharded.ranks.torchrun --nproc-per-node $(NPROC) -m dlrm_sharded.train $(DEMO) $(ARGS)

install: $(VENV)/installed  ## make the environment, as most targets do

sweep: $(VENV)/installed  ## train with every sharder and compare them; ARGS="seed=0,1,2"
	$(BIN)/python -m dlrm_sharded.train -m $(DEMO) $(SWEEP_RANKS) $(ARGS) "sharder=glob(*,exclude=plan_file)"

MINUTES ?= 2
calibrate: $(VENV)/installed  ## fit the cost model to this machine, which must be idle; MINUTES=10
	$(BIN)/dlrm-calibrate minutes=$(MINUTES) $(ARGS)

WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(VENV)/installed  ## run the quick tests, which take minutes on two workers; ARGS="tests/launch -x" WORKERS=0
	$(PYTEST) -m "not slow" --hypothesis-profile=quick $(ARGS)

# Many of the slow tests wait for processes, networks and timeouts.
test-all: WORKERS = 4
test-all: $(VENV)/installed  ## run all tests; ARGS="-m slow" for those that `make test` leaves out
	$(PYTEST) --hypothesis-profile=all $(ARGS)

check: lint unit docs  ## run all checks that every commit must pass

lint: $(VENV)/installed  ## check style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/installed  ## run the unit and contract tests
	$(PYTEST) -m "not slow" tests/unit tests/contract $(ARGS)

tensorboard: $(VENV)/installed  ## show the runs in runs/ on 127.0.0.1
	$(BIN)/tensorboard --logdir runs --host 127.0.0.1

benchmark: $(VENV)/installed  ## measure sharders, or training against TorchRec; ARGS="plans", "plain" or "host"
	$(BIN)/python scripts/benchmark.py $(or $(ARGS),plans)

soak: $(VENV)/installed  ## test wrong inputs and interruptions for an hour; ARGS="--number 10"
	$(PYTEST) tests/unit/soak --hypothesis-profile=soak
	$(BIN)/python -m tests.soak $(ARGS)

docs: $(VENV)/installed  ## build the documentation in site/
	$(BIN)/zensical build --strict --clean

help:  ## show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo 'Variables: DEVICE=cpu|cuda, NPROC=ranks, REQUIREMENTS=requirements/FILE.txt, ARGS=...'

$(VENV)/installed: $(REQUIREMENTS) requirements/fbgemm-gpu-shim/pyproject.toml pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	$(BIN)/dlrm-check-install
	touch $@
	@echo "the commands are in $(BIN); to use them: source $(BIN)/activate"

clean:  ## remove the environments
	rm -rf .venv-*
