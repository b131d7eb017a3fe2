PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# cpu: real vLLM engines on CPUs and a local Ray (some 4 GB), nixl: KV from memory to memory, trl: TRL's trainers;
# without them planner and simulator are tested alone.
EXTRAS ?= dev,profiles,vidur,cpu,trl,nixl

.PHONY: run test bench clean

run: $(VENV)/.run  ## The main command: every policy on up to 160 GPUs
	$(BIN)/python -m experiments.scale --nodes 160

test: $(VENV)/.test  ## Style, types, floors, laws, real data
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"
	$(BIN)/python -m pytest -m slow --reruns 2  # real processes: one file after the other, a mishap of timing is tried again

bench: $(VENV)/.run  ## Speed of planning and of simulation, as ratios
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.simulation

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build *.egg-info out
