# Everything happens in .venv, which the first call makes; nothing is installed outside this folder.
# Another Python:         make lab PYTHON=/path/to/python3.12
# Other parameters:       make run ARGS="-p world_size 2"
# One folder of tests:    make test ARGS="tests/unit -x"

.DEFAULT_GOAL := help
.PHONY: help lab test test-all run handouts lint bench gpu soak strip clean

BIN := .venv/bin
READY := .venv/.installed
ARGS ?=
# A GPU machine without network that has torch: wheels of what else is needed, for its own Python. make gpu WHEELS=folder PYTHON=python3
WHEELS ?=
SITE := build/site
SOAK_ROUNDS ?= 10
# Tests wait for a part of their time, so three run at a time on two cores. 0: one after the other, in one process.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --durations 10
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

# The newest supported Python that runs and can make a virtual environment. A name on PATH is not enough: version
# managers put names there that do not run, and Debian's Python has no ensurepip before python3-venv is installed.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 \
	&& echo $$python && break; done)

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

lab: $(READY) ## write your copies of the labs into work/ and open JupyterLab there; SOLVED=1 opens notebooks/
	$(BIN)/labkit lab $(if $(SOLVED),--solved) $(ARGS)

test: $(READY) ## run what a change needs: every test once, every notebook with 2 ranks
	$(PYTEST) $(ARGS)

test-all: $(READY) ## run what make test leaves out: other numbers of ranks, scripts under torchrun, kills, long soaks
	$(PYTEST) -m slow $(ARGS)

run: $(READY) ## run every notebook; executed copies and a summary page go to build/notebooks
	$(BIN)/labkit run $(NOTEBOOKS) --out build/notebooks $(ARGS)

handouts: $(READY) ## run every notebook, then make handouts for students and for the instructor in build/handouts
	$(BIN)/labkit run $(NOTEBOOKS) --out build/notebooks
	$(BIN)/labkit handouts $(NOTEBOOKS:%=build/%) --out build/handouts $(ARGS)

lint: $(READY) ## ruff, mypy, import-linter, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

bench: $(READY) ## run the benchmarks in tests/benchmarks
	$(BIN)/python -m pytest -o python_files='bench_*.py' -s tests/benchmarks $(ARGS)

gpu: $(if $(WHEELS),$(SITE)/.installed,$(READY)) ## run tests/gpu and the GPU benchmarks; the figures go to tests/gpu/RESULTS.md
	$(GPU_PYTHON) -m tests.gpu.record -s tests/gpu $(ARGS); tests=$$?; \
	$(GPU_PYTHON) -m tests.gpu.record -s -o 'python_files=bench_gpu_*.py' tests/benchmarks $(ARGS) && exit $$tests

GPU_PYTHON := $(if $(WHEELS),env PYTHONPATH=$(CURDIR)/$(SITE):$(CURDIR) PATH=$(CURDIR)/$(SITE)/bin:$$PATH \
	JUPYTER_PATH=$(CURDIR)/$(SITE)/share/jupyter $(PYTHON),$(BIN)/python)

$(SITE)/.installed: $(wildcard $(WHEELS)/*.whl)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $(SITE) $^
	PYTHONPATH=$(SITE) $(PYTHON) -m ipykernel install --prefix $(SITE) --name python3
	@touch $@

soak: $(READY) ## run the process tests SOAK_ROUNDS times
	round=1; while [ $$round -le $(SOAK_ROUNDS) ]; do echo "round $$round of $(SOAK_ROUNDS)"; \
	$(BIN)/python -m pytest -x -q tests/process $(ARGS) || exit 1; round=$$((round + 1)); done

strip: $(READY) ## bring edited notebooks into the form in which they are committed
	$(BIN)/python .ci/strip notebooks/*.ipynb

clean: ## remove build outputs and caches; .venv stays
	rm -rf build dist notebooks/checkpoints .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find .ci labkit tests notebooks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

$(READY): pyproject.toml .ci/install
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 with venv found on PATH." >&2; \
	echo "Install one (on Debian: apt-get install python3 python3-venv), or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python .ci/install
	@touch $@
