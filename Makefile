# Everything a newcomer needs is `make demo`: it makes .venv, installs the triple that fits this machine, and trains.
# PYTHON=python3.12 picks another interpreter, PYTEST_ARGS="-k schema" picks tests, DEMO_ARGS="--train.epochs 2" changes the demo,
# BENCH_ARGS="--only loader" the benchmarks. STACK=2.14 takes that torch, in an environment of its own, .venv-2.14.

PYTHON ?= python3
# The triple by its torch, as `doctor --stack` takes it. Empty: the doctor chooses one that fits this machine.
STACK ?=
TRIPLE = $(BIN)/python -m torchrec_ext.doctor --install $(addprefix --stack ,$(STACK))
# Bytecode for everything costs 40 s; the first import writes what is used.
EDITABLE = $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --editable
VENV := .venv$(addprefix -,$(STACK))
BIN := $(VENV)/bin
# What the demo uses; `sharded` is what goes with the triple. Tests and lint add `dev`. PySpark takes 468 MB on disk and needs Java.
EXTRAS ?= report,data,export,serve,launch,sharded
COMMA := ,
SPARK = $(if $(shell command -v java),$(COMMA)spark)
# Test files at a time, with one thread each, on two cores: many tests wait for processes that they start. A worker holds
# torch and TorchRec, 0.5 to 0.9 GB.
WORKERS ?= 4
GPU_PYTHON = $(if $(WHEELS)$(filter no,$(INSTALL)),$(PYTHON),$(BIN)/python)
# The slow ones too; to collect files without a test for a GPU takes longer than these tests.
GPU_TESTS = -q -rfE -m "gpu or (gpu and slow)" $$(grep -lrE 'mark\.gpu|device: torch\.device' tests --include='test_*.py' \
	$(if $(filter no,$(INSTALL)),--exclude-dir=apps))
# Written last, with this folder's path: without it, or in a folder that was moved, the environment is made anew.
STAMP := $(VENV)/.ready
# Written when the tools of `dev` are in it too.
TOOLS := $(VENV)/.tools
# The environment's tools first, whether it is activated or not: the launcher starts `python3` by name.
WITH_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"

ifneq ($(shell test -x $(BIN)/python && cat $(STAMP) 2>/dev/null),$(CURDIR))
$(shell rm -f $(STAMP) $(TOOLS))
endif

# Bytecode is kept: without it each of the hundreds of processes that tests start compiles the package anew, for a second.
unexport PYTHONPATH PYTHONHOME PIP_USER PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help everything demo test test-slow lint docs bench gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

everything: $(TOOLS) ## set up with all extras, PySpark where Java is, and shared memory between ranks: then no test of these is skipped
	@$(EDITABLE) '.[$(EXTRAS),dev,docs,kubernetes,retrieval$(SPARK)]'
	@$(BIN)/python -m torchrec_ext.distributed.shared_memory.library >/dev/null
	@$(TRIPLE)

demo: $(STAMP) ## set up, capture a loop, train two towers on two ranks (`torchx run`), store their vectors, answer a request
	@$(WITH_VENV) $(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(TOOLS) ## all tests but the slow ones; TORCHREC_EXT_DATA=DIR adds those on real data
	@$(WITH_VENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) || test $$? -eq 5

test-slow: $(TOOLS) ## the slow ones alone: long matrices, killed jobs, every recipe
	@$(WITH_VENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m slow $(PYTEST_ARGS) || test $$? -eq 5

lint: $(TOOLS) ## ruff check, ruff format --check, lint-imports, mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy

docs: $(TOOLS) ## build the site of docs/ into build/docs, and that of TAGS="v0.2.0 ..." beside it; needs no network once its tools are installed
	@$(BIN)/python -c 'import furo, myst_parser, sphinx' 2>/dev/null || \
		$(EDITABLE) '.[$(EXTRAS),dev,docs]'
	@$(WITH_VENV) DOCS_TAGS="$(TAGS)" $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@for tag in $(TAGS); do \
		rm -rf build/tags/$$tag && git worktree prune && git worktree add --quiet --detach --force build/tags/$$tag $$tag && \
		$(WITH_VENV) PYTHONPATH="$(CURDIR)/build/tags/$$tag" DOCS_TAGS="$(TAGS)" DOCS_ROOT=../ $(BIN)/python -m sphinx \
			--quiet build/tags/$$tag/docs build/docs/$$tag && git worktree remove --force build/tags/$$tag || exit 1; \
	done
	@echo "open build/docs/index.html"

bench: $(TOOLS) ## every benchmark, an hour at most, on a machine that does nothing else; writes benchmarks/results
	@$(BIN)/python -c 'import duckdb, faiss' 2>/dev/null || \
		$(EDITABLE) '.[$(EXTRAS),dev,retrieval]'
	@$(WITH_VENV) $(BIN)/python benchmarks/all.py $(BENCH_ARGS)

# Seconds of `make gpu`: a third at most for the tests, which a commit passes once; rows that it has no time for are measured by the next
# call. INSTALL=no leaves the machine as it is: torch with CUDA is enough for nearly all rows.
BUDGET ?= 3600
GPU_ROWS = benchmarks/gpu.py --out benchmarks/results/gpu/rows.jsonl $(BENCH_ARGS)
GPU_RUN = begun=$$(date +%s); failed=0; passed=build/gpu-tests-$${COMMIT:-$$(git rev-parse HEAD)}; \
	if test -e $$passed; then echo "make gpu: the tests passed before, see $$passed"; \
	elif $(GPU_PYTHON) -c 'import hypothesis, pytest' 2>/dev/null; then \
		timeout -k 10 $$(($(BUDGET) / 3)) $(GPU_PYTHON) -m pytest $(GPU_TESTS) && mkdir -p build && touch $$passed || { failed=1; \
		echo "make gpu: tests failed, or were not done in a third of BUDGET=$(BUDGET) s, see above; rows follow"; }; \
	else echo "make gpu: no pytest with hypothesis in $(GPU_PYTHON): tests are left out, rows follow"; fi; \
	$(GPU_PYTHON) $(GPU_ROWS) --budget $$(($(BUDGET) - $$(date +%s) + begun)) && exit $$failed

gpu: ## tests marked `gpu`, then rows, on a machine with a GPU; BUDGET=600: seconds; INSTALL=no: with its torch alone; WHEELS=DIR: and these
	@$(PYTHON) -c 'import sys; from torchrec_ext.stack import gpu_nodes; sys.exit(not gpu_nodes())' || { \
		echo "make gpu: this machine has no NVIDIA GPU (no /dev/nvidia0): run it on one that has"; exit 1; }
ifdef WHEELS
	@$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target build/wheels $(WHEELS)/*.whl
	@export PYTHONPATH=$(CURDIR):$(CURDIR)/build/wheels TORCHREC_EXT_UNCHECKED=1; $(GPU_RUN)
else ifeq ($(INSTALL),no)
	@export PYTHONPATH=$(CURDIR) TORCHREC_EXT_UNCHECKED=1; $(GPU_RUN)
else
	@$(MAKE) --no-print-directory $(TOOLS)
	@export $(WITH_VENV); $(GPU_RUN)
endif

clean: ## remove the environment, builds and caches; runs/ and data/ stay
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml torchrec_ext/stack.py
	@command -v $(PYTHON) >/dev/null || { \
		echo "set-up: there is no $(PYTHON): install Python 3.10 to 3.13, or name one: make demo PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "set-up: $(PYTHON) is $$($(PYTHON) --version 2>&1), the stack needs Python 3.10 to 3.13:" \
			"make demo PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "set-up: $(PYTHON) cannot make environments: apt install python3-venv, or make demo PYTHON=/path/to/python3"; exit 1; }
	@test -f $(STAMP) || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(STAMP)
	@$(TRIPLE)
	@$(EDITABLE) '.[$(EXTRAS)]'
	@printf '%s\n' '$(CURDIR)' > $(STAMP)

$(TOOLS): $(STAMP)
	@$(EDITABLE) '.[$(EXTRAS),dev]'
	@touch $(TOOLS)
