# What CI runs. A fresh clone needs Python 3.11 or later and make; everything else goes into .venv.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := placer server client benchmarks docs examples tests
WORKERS ?= 2
# Processes that tests start read what the first of them compiled, also where the environment says to keep none of it.
SUITE := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest --import-mode=importlib -p no:schemathesis

# Integrations start browsers, databases, services and programs; `exhaustive` are further cases of tests that run.
QUICK_TESTS := "not integration and not exhaustive"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint types walls tables suite test-integrations integrations-check docs pictures dist gpu gpu-check format clean FORCE

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed  ## profile, place, split and verify ResNet-50 and U-Net on the devices that are here
	$(BIN)/placer demo

test: lint types walls tables suite  ## everything that must hold: lint, types, import walls, tables of results, the test suite

lint: $(VENV)/installed-test  ## ruff: rules and format; codespell: typing errors
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/codespell $(SOURCES) docker *.md *.toml Makefile

types: $(VENV)/linked  ## mypy --strict
	$(BIN)/mypy --strict

walls: $(VENV)/linked  ## who may import whom
	$(BIN)/lint-imports

tables: $(VENV)/installed-test  ## the tables of README, docs and benchmarks/README.md are those of benchmarks/results
	$(BIN)/python -m benchmarks tables --check

# In parts: a process that has run thousands of tests takes a fifth longer for each further one. One worker more where
# tests wait for processes that they started.
suite: $(VENV)/linked  ## all tests but integrations and further cases; WORKERS=4 for more processes
	$(SUITE) -m $(QUICK_TESTS) -n $(WORKERS) --dist worksteal tests/placer/executor
	$(SUITE) -m $(QUICK_TESTS) -n $$(($(WORKERS) + 1)) --dist worksteal tests --ignore tests/placer/executor

test-integrations: $(VENV)/linked  ## the tests that `make test` leaves out, recorded; FOLDERS="tests/docker ..." for a part
	PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/integrations.py --workers $(WORKERS) $(FOLDERS)

integrations-check:  ## whether tests/integration-record.json speaks for the present code; needs no torch
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -S tests/integrations.py --check

docs: $(VENV)/installed-docs  ## build the documentation into build/docs; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python docs/check_offline.py build/docs

pictures: $(VENV)/installed-test  ## draw the pictures of README and docs again
	$(BIN)/python docs/draw_pictures.py

# The wheel is built from the sdist, which shows that the sdist is complete. The environment of the demo holds the wheel
# alone: an installed checkout would hide a file that is missing from it. The constraints also choose the build of torch.
dist: $(VENV)/installed-dist  ## build wheel and sdist into dist, check them, and run the demo from the wheel alone
	rm -rf dist build/from-wheel
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m venv build/from-wheel
	build/from-wheel/bin/python -m pip --disable-pip-version-check install -c constraints.txt "$$(echo dist/*.whl)[all]"
	cd build/from-wheel && env -u PYTHONPATH bin/placer demo

gpu: $(VENV)/linked  ## the GPU tests, recorded; QUICK=1 for every path once, FOLDERS="tests/placer/devices ..." for a part
	$(BIN)/python tests/gpu.py $(if $(QUICK),--quick) $(FOLDERS)

gpu-check:  ## whether tests/gpu-record.json speaks for the present code; needs neither torch nor a GPU
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -S tests/gpu.py --check

format: $(VENV)/installed-test  ## put the sources into ruff's format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:  ## remove .venv and what was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Stamps: each is newer than what it was made from, so a second call installs nothing.

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Placer needs Python 3.11 or later; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[all]'
	touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[test]' setuptools
	$(PIP) install -c constraints.txt --no-deps torchvision
	touch $@ $(VENV)/installed

# In the next two, Placer itself is installed without torch: its docstrings are read, not imported. The install replaces
# the tree of links below, so that tree is made again when it is next needed.
$(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[docs]'
	rm -f $(VENV)/linked
	touch $@

$(VENV)/installed-dist: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[dist]'
	rm -f $(VENV)/linked
	touch $@

# mypy and lint-imports follow files, not import hooks: a strict editable install is a tree of links, made anew when a
# file comes or goes.
$(VENV)/linked: $(VENV)/installed-test $(VENV)/files
	rm -rf build/__editable__.*
	$(PIP) install --quiet --no-deps --no-build-isolation -e . --config-settings editable_mode=strict
	touch $@

$(VENV)/files: FORCE | $(BIN)/python
	@find placer server client -name '*.py' -o -name py.typed | sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
