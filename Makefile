# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# Every command of the project; `make help` lists them.

# The interpreter that makes the environments: PYTHON=python3.12 make serve
PYTHON ?= python3
PORT ?= 8000
MODEL ?= examples/demo-glm-dsa-ragged-exl3
# What `make drift` compares the pinned release with: a version, or a wheel's path.
AGAINST ?= 0.33.0
# What `make rebase` moves to, a version; with APPLY=1 it then moves the pins.
VERSION ?=
APPLY ?=
# More words for pytest: make test ARGS="tests/fork -x"
ARGS ?=

# The commands below do the same on every machine, so a GPU is used only on request.
export VLLM_TARGET_DEVICE ?= cpu

BIN := .venv/bin
# The linters, and whatever else needs a Python but not the fork.
LINT := build/lint
# Says what is missing, one line each, or sets $$python to build with.
define preflight
command -v $(PYTHON) > /dev/null \
  || { echo "missing: Python: there is no $(PYTHON) on PATH" >&2; exit 1; }; \
python=$$($(PYTHON) tools/preflight.py $(1)) || exit 1
endef
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# --- The environment of the fork -------------------------------------------------

# torch is a requirement of the build and of the fork. With the build's requirements
# in the environment first, pip need not make a second one with a second torch.
# pip itself comes first, since the one that Python brings may be years old.
.venv/.ready: pyproject.toml requirements/test.txt
	@$(preflight); \
	 echo "preparing .venv with $$python (some minutes the first time)"; \
	 test -x $(BIN)/pip || "$$python" -m venv .venv
	@mkdir -p build
	@$(BIN)/python -c 'import tomllib; \
	 project = tomllib.load(open("pyproject.toml", "rb")); \
	 print(*project["build-system"]["requires"], sep="\n")' > build/requirements.txt
	@$(BIN)/pip install -qq --upgrade pip
	@$(BIN)/pip install -qq -r build/requirements.txt -r requirements/test.txt
	@touch $@

# The fork's own files are linked into the environment: an edit is live, but a file
# that came or went needs composing. So this holds their names, and the target.
build/composed-of.txt: FORCE
	@mkdir -p build
	@{ echo "$(VLLM_TARGET_DEVICE)"; \
	   find vllm exl3 -name __pycache__ -prune -o -type f ! -name '*.so' -print | sort; \
	 } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# pip composes by itself; composing first says what was laid over upstream, and what is
# refused in one line.
.venv/.built: .venv/.ready build/composed-of.txt setup.py CMakeLists.txt UPSTREAM.toml \
  $(shell find csrc tools/fork -name __pycache__ -prune -o -type f ! -name 'drift*' -print)
	@$(BIN)/python -m tools.fork.compose --link --out build/composed-$(VLLM_TARGET_DEVICE)
	@echo "building the ops, and fetching what the fork requires"
	@$(BIN)/pip install -qq --no-build-isolation -e .
	@touch $@

$(LINT)/.built: requirements/lint.txt
	@$(call preflight,--python-only); \
	 "$$python" -m venv --clear $(LINT)
	@$(LINT)/bin/pip install -qq -r $<
	@touch $@

build/docs/.built: requirements/docs.txt
	@$(call preflight,--python-only); \
	 "$$python" -m venv --clear build/docs
	@build/docs/bin/pip install -qq -r $<
	@touch $@

# nvcc looks for its libraries in a folder that its packages call otherwise.
build/nvcc/.built: requirements/nvcc.txt
	@$(call preflight,--python-only); \
	 "$$python" -m venv --clear build/nvcc
	@build/nvcc/bin/pip install -qq -r $<
	@cd build/nvcc/lib/python3*/site-packages/nvidia/cu13 && ln -s lib lib64
	@touch $@

FORCE:

# --- Commands ---------------------------------------------------------------------

.PHONY: help install serve test test-slow lint format hooks docs compose wheel nvcc drift \
  rebase upstream-tests clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' \
	  $(MAKEFILE_LIST)

install: .venv/.built ## Build the fork into .venv; edits of it are live

serve: .venv/.built ## Serve the demo model on 127.0.0.1 (PORT=8000, MODEL=folder)
	@exec $(BIN)/python -m tools.serve_demo --model $(MODEL) --port $(PORT)

test: .venv/.built ## Run the tests, less the slow ones (ARGS="tests/fork -x")
	@$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-slow: .venv/.built ## Run the slow tests: engines, wheels, tensor parallel
	@$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(LINT)/.built ## Check format, style, types, spelling and licence headers
	@$(LINT)/bin/pre-commit run --all-files

format: $(LINT)/.built ## Format the Python and C++ files
	@$(LINT)/bin/ruff check --fix-only --quiet .
	@$(LINT)/bin/ruff format --quiet .
	@git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' \
	 | xargs -r $(LINT)/bin/clang-format -i

hooks: $(LINT)/.built ## Run the checks of `make lint` at every commit
	@$(LINT)/bin/pre-commit install

docs: build/docs/.built ## Build the site of docs/ into build/site
	@NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict

compose: .venv/.built ## Write the composed tree to build/composed, to look at
	@$(BIN)/python -m tools.fork.compose --out build/composed

wheel: .venv/.built ## Build a wheel of the fork into dist/
	@$(BIN)/pip wheel -qq --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

nvcc: build/nvcc/.built ## Fetch nvcc as packages, if you have no CUDA toolkit
	@for nvcc in $(CURDIR)/build/nvcc/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do \
	   echo "export CUDACXX=$$nvcc"; done

drift: $(LINT)/.built ## Compare upstream with another release (AGAINST=0.33.0)
	@$(LINT)/bin/python -m tools.fork.drift --against $(AGAINST)

rebase: .venv/.built ## Rehearse a move to another release (VERSION=0.33.0, APPLY=1)
	@$(BIN)/python -m tools.rebase "$(VERSION)" --tests "$(ARGS)" $(if $(APPLY),--apply)

upstream-tests: .venv/.built ## Run upstream's own tests on stock and on the fork
	@$(BIN)/python -m tools.upstream_tests

clean: ## Remove the environments and everything that was built
	@rm -rf .venv build dist *.egg-info
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@rm -f exl3/*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
