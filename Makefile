# Two commands: `make serve` installs and starts the server with the bundled model, `make test` runs everything.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Several processes with several OpenMP threads each starve one another on a small machine.
export OMP_NUM_THREADS ?= 1

.PHONY: install serve test test-kernels chaos lint bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=24"
	# torch first and pinned: a bare requirement would pull a build with CUDA libraries where this one is at hand.
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

serve: install
	$(BIN)/expertmesh serve $(ARGS)

# Two workers: one takes the system tests in turn, which mostly wait, the other the unit tests.
test: install
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder $(ARGS)

# Kernels alone: interpreted against their references, and compiled for GPUs that need not be here.
test-kernels: install
	$(BIN)/python -m pytest tests/kernels tests/actors/model/test_triton_model.py $(ARGS)

# Nightly: 200 seeded kills, stops and scalings under load; about half an hour on two cores.
chaos: install
	EXPERTMESH_STORM_STEPS=10000 $(BIN)/python -m pytest tests/actors/exchange/test_storm.py >&2
	$(BIN)/python -m tests.system.chaos $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m tests.bench $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
