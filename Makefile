# `make train` and `make test` do all set-up on a fresh machine: the virtual environment, the installation, the run.

PYTHON ?= python3
VENV   ?= .venv
RANKS  ?=
STAGE  ?=
MODEL  ?=
BATCH  ?=
STEPS  ?=

BIN   := $(VENV)/bin
READY := $(VENV)/.ready
TRAIN := $(VENV)/.train
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # else each process compiles the sources, and pytest all tests, anew: seconds

.PHONY: train dist docs test test-all test-fast test-slow test-rounding test-cpus test-cuda test-torch lint format types bench \
	clean

train: $(TRAIN)
	@$(BIN)/python examples/launch.py $(if $(RANKS),--ranks='$(RANKS)') $(if $(MODEL),--model='$(MODEL)') \
		$(if $(STAGE),--stage='$(STAGE)') $(if $(BATCH),--batch='$(BATCH)') $(if $(STEPS),--steps='$(STEPS)')

# What says within minutes whether a change is right; .ci/run runs test-slow and test-rounding behind it.  Types are
# checked beside the tests: mypy takes one core, and tests do not always keep two.
test: format
	@$(MAKE) --no-print-directory -j2 types test-fast

# A wheel and what it is built from, in dist/.
dist: $(READY)
	$(BIN)/python -m build --no-isolation --outdir dist

# The pages as a site, docs/site/index.html; a broken link or any other warning ends it.
docs: $(READY)
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --conf-dir docs . docs/site

# Two processes take whole files, whose tests share what is costly to set up, such as sets of ranks.  A process that
# crashes is not replaced: xdist would wait for ever for the rest of its file.
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

lint: format types

format: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test-all: $(READY)
	$(BIN)/python -m pytest $(SPREAD)

test-fast: $(READY)
	$(BIN)/python -m pytest $(SPREAD) -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest $(SPREAD) -m slow

# Steps beside plain PyTorch once more, with the last bits that an unlike CPU might give (tests/other_kernels.py), and
# with transfers between ranks that end no earlier than they must (graphzero/testing/strict.py).
test-rounding: $(READY)
	$(BIN)/python -m pytest $(SPREAD) -m "not slow" --other-kernels --strict-transfers tests/test_graph_nd.py tests/test_build.py \
		tests/optimizers/test_torch_optimizers.py tests/micro/test_micro_processes.py

# All tests under every kind of CPU that this one can stand for: hours.
test-cpus: $(READY)
	$(BIN)/python tests/on_cpus.py

# On a machine with a GPU, in any environment that has graphzero's requirements and pytest: PYTHON=... chooses it.
# Several ranks share the GPU by NCCL from 2.30 on (LD_PRELOAD=.../libnccl.so.2 gives torch a newer one), else by gloo.
test-cuda:
	$(PYTHON) -m pytest -m cuda -rs tests/cuda

# The fast tests on another torch, in a virtual environment of its own: make test-torch TORCH=2.11.0.  An index has
# CPU wheels only of some versions; from PyPI torch comes with CUDA, which is gigabytes.  No GPU is needed.
TORCH ?= 2.11.0
test-torch: .venv-torch-$(TORCH)/.ready
	.venv-torch-$(TORCH)/bin/python -m pytest -p no:cacheprovider $(SPREAD) -m "not slow"

.venv-torch-%/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$*
	grep -v '^torch==' constraints.txt > .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-torch-$*/constraints.txt \
		-e ".[examples,dev]" torch==$*
	@touch $@

# Step time and memory beside DDP, FSDP2 and DeepSpeed on gloo ranks, into build/bench.md: each command that stands above
# a table of bench/results/step_time.md, and the table that it gives now.  Wants idle cores, for long.  DeepSpeed is left
# out where it does not install.
bench: $(READY)
	-DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	mkdir -p build
	grep -oE '`([A-Z_]+=[0-9a-z]+ )*python bench/[^`]*`' bench/results/step_time.md | tr -d '`' | while read -r command; do \
		printf '`%s`:\n\n' "$$command"; PATH="$(abspath $(BIN)):$$PATH" sh -c "$$command" < /dev/null; printf '\n'; done | tee build/bench.md

# What examples need, without the tools of development.
$(TRAIN): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[examples]"
	@touch $@

$(READY): $(TRAIN)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[examples,dev]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-torch-* build dist docs/site *.egg-info .pytest_cache .mypy_cache .ruff_cache
