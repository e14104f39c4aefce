# Two commands, each complete on a fresh machine with Python 3.11 or newer: `make audit` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# -n 2: the suite is split over two worker processes.
PYTEST_ARGS ?= -n 2

.PHONY: audit readme test lint types contracts tests clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

NATIVE := CMakeLists.txt $(wildcard native/*)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.installed

audit: $(VENV)/.installed
	$(BIN)/rooftile audit llama-3.1-8b --device h100-sxm

test: lint types contracts tests

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

contracts: $(VENV)/.installed-test
	$(BIN)/lint-imports

tests: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

readme: $(VENV)/.installed-test
	$(BIN)/python tests/test_readme.py

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
