# One command per intent, the same by hand and in CI. `make help` lists them.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
DEMO_STAMP := $(VENV)/.set-up-demo

# What the installed package is built from; Python files are used where they lie.
SOURCES := pyproject.toml constraints.txt requirements-examples.txt CMakeLists.txt \
           $(shell find protos kernels -name '*.proto' -o -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh' -o -name CMakeLists.txt -o -name '*.cmake')

# Build tools come in pinned too. Older pip reads the first in its build environments, newer pip the second.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
       $(BIN)/python -m pip --quiet --quiet

.PHONY: setup demo test test-long drill test-compose lint format bench gpu-check docs screenshots sanitize wheels wheel-client clean help
.DELETE_ON_ERROR:

setup: $(STAMP)  ## make .venv and install everything, if anything it is made from changed

$(STAMP): EXTRAS := dev,examples
$(DEMO_STAMP): EXTRAS := demo
# To compile every Python file of torch takes longer than all the rest, and the demo imports a part of them.
$(DEMO_STAMP): HOW := --no-compile
$(STAMP) $(DEMO_STAMP): $(SOURCES) scripts/preflight
	@PYTHON=$(PYTHON) scripts/preflight $(if $(WHEEL),wheel)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@PYTHON=$(BIN)/python scripts/preflight index
	@echo 'Installing Atoll and what it needs into $(VENV): minutes the first time, most of it downloads'
	@$(PIP) install $(HOW) $(if $(WHEEL),'$(WHEEL)[$(EXTRAS)]',--editable '.[$(EXTRAS)]')
	@$(PIP) install $(HOW) --no-deps --requirement requirements-examples.txt
	@touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))  ## train a real model on three unequal local workers
	PYTHONDONTWRITEBYTECODE= $(BIN)/python examples/demo.py # or each of its processes would compile torch for itself

test: setup  ## run the tests; ARGS="tests/kernels -k fork" chooses some
	$(if $(ARGS),$(BIN)/python -m pytest -m "not containers" $(ARGS),$(BIN)/python scripts/test)

test-long: setup  ## the tests that take minutes each: drills, clusters that lose machines, wheels built and installed
	$(BIN)/python scripts/test --long

drill: setup  ## kill parts of a private cluster at random while it trains; ARGS="--minutes 30 --seed 7": docs/drills.md
	PYTHONPATH=tests $(BIN)/python -m drill $(ARGS)

test-compose: setup  ## run docker-compose.yml for real, with an agent killed on the way
	$(BIN)/python -m pytest tests/compose -m containers -rA

lint: setup  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHON=$(BIN)/python scripts/typecheck

format: setup  ## let ruff put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## the figures of docs/performance.md; BENCH=kernels_memory chooses one
	for script in benchmarks/$(or $(BENCH),*).py; do echo "== $$script"; $(BIN)/python "$$script" || [ $$? -eq 2 ] || exit 1; done  # 2: not here

gpu-check: setup  ## what Atoll does on this machine's GPU, in stages: docs/gpu.md; ARGS="--stages 0,2" chooses some
	$(BIN)/python scripts/gpu-check $(ARGS)

docs: setup  ## the manual as a site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

screenshots: setup  ## docs/images/dashboard-*.png, of a cluster on this machine, by Chromium
	$(BIN)/python scripts/screenshots

sanitize:  ## the kernels' C++ under address, undefined-behaviour and thread sanitizers
	scripts/sanitize

wheels: setup  ## build and test dist/atoll-*-manylinux*.whl, one for each CPython of 3.11 to 3.14 on PATH
	$(BIN)/python scripts/wheels

wheel-client: setup  ## build dist/atoll-*-py3-none-any.whl: a client for any system, without kernels, by no compiler
	$(PIP) wheel --no-deps --wheel-dir dist -Cbuild-dir=build/client -Cwheel.platlib=false -Cwheel.py-api=py3 -Ccmake.define.ATOLL_KERNELS=OFF .

clean:  ## remove everything that was built
	rm -rf $(VENV) build dist .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis atoll/v1
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14
