# `make release` and `make test` do all the set-up they need; nothing else has to be run before.
PYTHON ?= python3
BIN := .venv/bin
# one thread per rank and no telemetry from anything that is started here
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export GX_ANALYTICS_ENABLED := false

.PHONY: help release test prove lint check bench drill runbook lock clean

help: ## show the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q flows trainer validation infra  # every command is a process of its own
	@touch .venv/installed

release: .venv/installed ## set up, then release the flights recipe on embedded defaults
	$(BIN)/seatrial release flights

test: .venv/installed ## set up, then run the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

prove: .venv/installed ## the long proofs that `make test` only samples (an hour and more)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "slow or proof"

lint: .venv/installed ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: test lint ## what CI runs

bench: .venv/installed ## run every benchmark and write docs/benchmarks.md
	$(BIN)/python benchmarks/all.py

drill: .venv/installed ## cause every failure mode for real, see it found and dealt with (a few minutes)
	$(BIN)/seatrial drill --all

runbook: .venv/installed ## write docs/runbook.md and its pages from the registry of failure modes
	$(BIN)/seatrial runbook

lock: ## remake requirements.lock from pyproject.toml (CPU build of torch)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'torch==2.13.0' 'setuptools>=80' -e '.[dev,servers]'
	{ echo "# Every package of the virtual environment, pinned. Remade by: make lock"; $(BIN)/python -m pip freeze --all --exclude-editable | grep -viE '^(pip|wheel)==' | sed 's/+cpu//'; } > requirements.lock

clean: ## remove the virtual environment and all local state
	rm -rf .venv .seatrial examples/*/.seatrial build *.egg-info
