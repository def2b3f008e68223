# `make demo` and `make test` set up .venv by themselves, once.
PYTHON ?= python3.11
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test lint setup clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@echo "Setting up .venv: about 4 minutes and 7 GB, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	@touch $@

demo: .venv/installed
	$(BIN)/python -m pipeline run configs/demo.yaml

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

clean:
	rm -rf .venv data/demo runs/demo
