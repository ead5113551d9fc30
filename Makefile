# `make demo` and `make test` set up everything they need in a virtual environment of their own.
#
#   PYTHON=python3.12   the interpreter the environment is made with; else the newest one found, from 3.11 on
#   VENV=.venv          where the environment lies
#   GPU=no              on a machine with an NVIDIA GPU: neither install CUDA nor use the GPU
#   STEPS=200           training steps of the demo
#   ARGS=...            further arguments of the demo or of pytest (a later -m replaces an earlier one)
#   JAX=0.10.0          a certain jax version, "newest" (the default) or "nightly"

# Tried in this order. Pythons newer than those of the classifiers in pyproject.toml come last, as plain
# `python3`: not every dependency may have a wheel for them. Some of these are there without working, or
# without what makes environments.
PYTHONS := python3.13 python3.12 python3.11 python3
IS_USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
ifeq ($(origin PYTHON),undefined)
PYTHON = $(eval PYTHON := $(shell for python in $(PYTHONS); do \
  "$$python" -c '$(IS_USABLE)' 2>/dev/null && echo "$$python" && exit; done; echo python3))$(PYTHON)
endif
VENV ?= .venv
GPU ?= $(if $(wildcard /dev/nvidia0 /proc/driver/nvidia/version),yes,no)
STEPS ?= 200
ARGS ?=
JAX ?= newest
# pytest-xdist's workers; two fit a laptop's memory, each compiles with several threads.
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet
STAMP := $(VENV)/.installed-gpu-$(GPU)-jax-$(JAX)

# Without a GPU, XLA's GPU compiler, which needs none; with one, CUDA.
EXTRAS_no := test,deviceless
EXTRAS_yes := test,gpu

JAX_PIN_newest :=
JAX_PIN_nightly := jax jaxlib
JAX_INDEX := $(if $(filter nightly,$(JAX)),--pre --extra-index-url \
  https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/)
JAX_PIN := $(if $(filter newest nightly,$(JAX)),$(JAX_PIN_$(JAX)),"jax==$(JAX)" "jaxlib==$(JAX)")

ifneq ($(GPU),yes)
export JAX_PLATFORMS ?= cpu
endif

.PHONY: help demo test test-all setup lint format docs wheel clean

help:
	@echo "make demo     trains a small GPT with and without rematerialization"
	@echo "make test     runs the tests that are not slow: half an hour on two cores"
	@echo "make test-all runs all tests, as CI does"
	@echo "make setup    only makes the virtual environment in $(VENV)"
	@echo "make lint     ruff, pyright and a check of the spelling"
	@echo "make format   reformats"
	@echo "make docs     builds the site in build/site, with all links checked"
	@echo "make wheel    builds dist/*.whl"
	@echo "make clean    removes $(VENV) and everything built"

demo: $(STAMP)
	$(BIN)/python examples/train_gpt.py --steps $(STEPS) $(ARGS)

# Neighbours stay on one worker, which has compiled already what they share.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(ARGS)

setup: $(STAMP)

# The environment is made anew whenever what it depends on has changed.
$(STAMP): pyproject.toml Makefile
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "there is no $(PYTHON); set PYTHON=/path/to/python3.11 or newer"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "remat needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "making a virtual environment in $(VENV) with $$("$(PYTHON)" --version) (some minutes, once)"
	@rm -rf "$(VENV)"
	@"$(PYTHON)" -m venv "$(VENV)" || { \
	  echo "no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PIP) --upgrade pip "setuptools>=77"
	$(PIP) --no-build-isolation -e ".[$(EXTRAS_$(GPU))]" $(JAX_INDEX) $(JAX_PIN)
	@$(BIN)/python -c 'import jax; print("jax", jax.__version__)'
	@touch $@

lint: $(STAMP)
	$(PIP) --no-build-isolation -e ".[lint]"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/codespell

format: $(STAMP)
	$(PIP) --no-build-isolation -e ".[lint]"
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(PIP) --no-build-isolation -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf "$(VENV)" build dist remat.egg-info .pytest_cache .ruff_cache .hypothesis
