# Thin wrappers; each target's command is the line below it. `make PYTHON=python3.12` chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup quickstart test fast check fix bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up .venv and run the first experiment (about a minute after set-up)"
	@echo "make test         set up .venv and run all tests"
	@echo "make fast         the fast tests only"
	@echo "make check        formatting, lint, types, import layers"
	@echo "make fix          formatting and what lint can mend"
	@echo "make bench        benchmarks, as ratios and per client-round"

setup:
	@$(PYTHON) scripts/setup_env.py

quickstart: setup
	$(BIN)/fedstrata quickstart

test: setup
	$(BIN)/pytest -n 2

fast: setup
	$(BIN)/pytest -n 2 -m "not engine"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/codecs.py
	$(BIN)/python benchmarks/prefix_reuse.py

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
