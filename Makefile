# `make demo` and `make test` do everything on a fresh machine without a GPU, installs included. `make help` lists the rest.

PYTHON ?= python3
# Where the environment is built; VENV=/elsewhere works too.
VENV ?= .venv
# The pinned versions that CI uses. A CPU build is enough, and on a machine without a GPU it is the smaller download.
TORCH ?= torch==2.13.0
# Installed without its dependants' opinion: the newest Triton whose interpreter the CPU tests of the kernels run in.
TRITON ?= triton==3.6.0
# Test processes; 2 fit the two cores of a CI machine.
JOBS ?= 2

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
PIP = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
# One thread per process: the processes already fill the cores.
QUIET_CORES = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint format wheel install clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

demo: $(STAMP)  ## train the small Wukong twice, fp32 eager and backend="loka", and compare
	$(BIN)/python -m examples.demo $(ARGS)

# Files in their order: sorted by their number of tests, the last would be one of few and long ones, on one core alone.
test: $(STAMP) lint  ## ruff, mypy and the CPU tests
	$(QUIET_CORES) $(BIN)/python -m pytest -m "not gpu" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Nothing is installed here: a GPU machine brings its own torch, and the checkout is imported as it stands.
test-gpu:  ## the tests that need a CUDA device, with the torch of $(PYTHON)
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu $(ARGS)

lint: $(STAMP)  ## ruff and mypy, nothing changed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite the files
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(STAMP)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel

install: $(STAMP)  ## only make the environment

$(STAMP): pyproject.toml Makefile
	@echo "installing $(TORCH), $(TRITON) and the project into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) "$(TORCH)"
	@$(PIP) --no-deps "$(TRITON)"
	@$(PIP) --editable ".[dev,models]"
	@touch $@

clean:  ## remove the environment and what builds left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
