# Every target makes its own .venv first; nothing here needs root or a prepared HOME.
#   make demo    the whole story on a model trained on the spot
#   make test    the tests
#   make check   what must be green: format, lint, types, layers, tests
#   make bench   measure this machine
#   make format  rewrite the code in the house format

PYTHON ?= python3
VENV   := $(CURDIR)/.venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SOURCES := tierstore tests $(wildcard benchmarks tools)

.DEFAULT_GOAL := help
.PHONY: help venv demo test check format-check lint types layers bench format clean

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)

# The stamp is written last, so an install that was cut off is done again.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m tierstore demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: format-check lint types layers test

format-check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/python -m pytest tests/test_layers.py tests/test_tidy.py

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	$(BIN)/python -m benchmarks

format: $(STAMP)
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
