# `make` alone lists what there is. ARGS and PYTEST_ARGS go to the command behind a target:
#   make demo ARGS="--store demo.db"      make test PYTEST_ARGS="-m 'not engine'"
PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help bootstrap demo test viewers check format bench faults calibrate random gpupath clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## */\1|/p' Makefile | while IFS='|' read -r name text; do \
	    printf '  make %-10s %s\n' "$$name" "$$text"; done

bootstrap:  ## install what the rest needs into .venv (first time: minutes; then nothing to do)
	@command -v $(PYTHON) >/dev/null || { echo "bootstrap: no $(PYTHON) found: install Python 3.11 or newer, or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) scripts/bootstrap.py

demo: bootstrap  ## a real engine with a tiny model, and the stopwatch of its requests
	$(BIN)/stagetrace demo $(ARGS)

check: bootstrap  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## check, then every test, those with the real engine included
	$(BIN)/python -m pytest $(PYTEST_ARGS)

viewers: bootstrap  ## requests of a real server in MLflow and Phoenix (installs both the first time: 1.3 GB)
	$(BIN)/python -m pytest tests/viewers $(PYTEST_ARGS)

format: bootstrap  ## put the sources into the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: bootstrap  ## what recording costs, measured here
	$(BIN)/python -m benchmarks $(ARGS)

faults: bootstrap  ## does time land in the stage it belongs to? a real server, delayed at known places
	$(BIN)/python -m tests.faults $(ARGS)

calibrate: bootstrap  ## the gate's false alarms and catches on real servers (hours; see ARGS="--help")
	$(BIN)/python -m tests.calibrate $(ARGS)

random: bootstrap  ## 2,800 random requests to real servers, and every rule for every trace (ten minutes)
	$(BIN)/python -m tests.randomised $(ARGS)

gpupath: bootstrap  ## endings, context and failing hooks on what one GPU runs, its kernels interpreted (ten minutes)
	LAYOUT=gpu $(BIN)/python -m pytest tests/engine/test_context.py tests/engine/test_endings.py \
	    tests/engine/test_raising_hooks.py $(PYTEST_ARGS)

clean:  ## remove what builds and tests left (the environment stays: rm -r .venv)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
