# `make` alone lists the targets.
SHELL := /bin/bash
BIN := .venv/bin
# The same large packages are imported by dozens of processes: without their byte code each start
# takes several times as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart test check-long lock audit clean
.DEFAULT_GOAL := help

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

setup: ## Install what Gyre needs into .venv, Debian packages included.
	@bash scripts/setup.sh $(SETUP_FOR)

quickstart: setup ## Set up, then train a small policy on this machine.
	@$(BIN)/gyre train --config quickstart

test check-long: SETUP_FOR := --tests
test: setup ## Set up, then run the checks and all tests.
	@echo "ruff" && $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "mypy" && $(BIN)/mypy
	@echo "import contract" && $(BIN)/lint-imports --no-cache
	@echo "pytest" && $(BIN)/python -m pytest

check-long: setup ## Run the tests that take many minutes each and are no part of `make test`.
	@$(BIN)/python -m pytest -m long

lock: setup ## Resolve the dependencies again and write the locked requirement files.
	@$(BIN)/python scripts/lock.py

audit: setup ## Look the locked packages up in the database of known vulnerabilities.
	@bash scripts/audit.sh

clean: ## Remove the environment, caches and builds; runs in .gyre stay.
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
