# `make train` and `make test` do all set-up on a fresh machine: the virtual environment, the installation, the run.

PYTHON ?= python3
VENV   ?= .venv
RANKS  ?= 2
STAGE  ?= 2
MODEL  ?= gpt2
STEPS  ?=

BIN   := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-fast test-slow lint clean

train: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node=$(RANKS) examples/train.py --model $(MODEL) --stage $(STAGE) $(if $(STEPS),--steps $(STEPS))

test: lint test-fast test-slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 -m slow

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[examples,dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
