# Tested versions are pinned in constraints.txt, or in a file of that version of Python, such as constraints-3.10.txt;
# setup.py and pyproject.toml keep ranges.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS := $(firstword $(wildcard constraints-$(PYTHON_VERSION).txt) constraints.txt)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# Without bytecode on disk, each of the many processes of the tests would compile the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup pretrain test test-all parity docs lint format clean

setup: $(VENV)/.complete

# torch comes first: DeepSpeed's set-up and our own look at it. seqeval's set-up fails without build isolation.
# megatron-core has no wheel for Python 3.14, and its set-up asks the first `python3` for pybind11.
$(VENV)/.complete: pyproject.toml setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel packaging ninja pybind11
	$(PIP) torch numpy seqeval
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --editable ".[dev,docs,notebook,triton]"
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation --no-deps megatron-core
	touch $@

# MODEL is a family, such as t5: its quickstart in runs/t5-quickstart. Without it, GPT-2's in runs/quickstart.
RUN = $(if $(MODEL),--model $(MODEL)-quickstart --output-dir runs/$(MODEL)-quickstart,--output-dir runs/quickstart)

pretrain: setup
	$(BIN)/deepspeed pretrain.py --model-parallel-size 2 $(RUN) $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Every case of the tests, where `make test` visits a part: before a release.
test-all: export SHARDZOO_TESTS = all
test-all: test

# The whole matrix of architectures against transformers, as the table of docs/models.md.
parity: setup
	$(BIN)/python tests/zoo/table.py $(ARGS)

# The documentation site, in build/site. Its drawings and the table of recipes are made from the code.
docs: export NO_MKDOCS_2_WARNING = 1
docs: setup
	$(BIN)/python docs/scripts/drawings.py
	$(BIN)/python docs/scripts/recipes.py
	$(BIN)/python -m mkdocs build --strict $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info runs
