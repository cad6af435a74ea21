# Each target sets up what it needs in .venv and is quick when run again.
# PYTHON chooses the interpreter (3.11 or newer) that .venv is made from.
PYTHON ?= $(firstword $(shell command -v python3.11 python3 python))
# TORCH=2.15.0 takes that version of torch, in an environment of its own.
TORCH ?=
VENV := .venv$(addprefix -,$(TORCH))
PY := $(VENV)/bin/python
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check -c $(CONSTRAINTS)
SOURCES := pyproject.toml constraints.txt
NPROC ?= 2
# Test files run side by side, each in one of WORKERS processes.
WORKERS ?= 2
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadfile
PYTEST_ARGS ?=
SECONDS ?= 600

# torch's CUDA build in an environment of its own (4.7 GB), and what stands in for a GPU there. The
# package index is asked alone: a machine's settings may offer a build without CUDA first.
CUDA_VENV := .venv-cuda
CUDA_PY := $(CUDA_VENV)/bin/python
CUDA_RUNTIME := $(CUDA_VENV)/cuda_on_cpu/libcuda.so.1
CUDA_INDEX ?= https://pypi.org/simple
# The libraries whose models are compared: transformers changes once torchvision is there.
SWEEP_VENV := .venv-sweep
SWEEP_PY := $(SWEEP_VENV)/bin/python
ON_CPU_THREADS := LD_PRELOAD=$(CURDIR)/$(CUDA_RUNTIME) PYTORCH_NVML_BASED_CUDA_CHECK=0 \
	CUDA_ON_CPU_DEVICES=4

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-cuda test-cuda-slow fuzz fuzz-cuda sweep cover docs lint format bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1	\2/' | expand -t 18

demo bench fuzz fuzz-cuda sweep: export OMP_NUM_THREADS ?= 1

demo: $(VENV)/.demo ## train a GPT on two ranks, showing its plan and its rewritten graph
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/train_gpt.py $(ARGS)

test: $(VENV)/.test ## run the tests but for the widest matrix
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.test ## run the widest matrix, which `make test` leaves out
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-cuda: $(CUDA_RUNTIME) ## run the tests of CUDA and NCCL on a CUDA runtime made of CPU threads
	$(ON_CPU_THREADS) $(CUDA_PY) -m pytest -n $(WORKERS) --dist loadfile -m "cuda and not slow" $(PYTEST_ARGS)

test-cuda-slow: $(CUDA_RUNTIME) ## run those of them that take minutes
	$(ON_CPU_THREADS) $(CUDA_PY) -m pytest -n $(WORKERS) --dist loadfile -m "cuda and slow" $(PYTEST_ARGS)

fuzz: $(VENV)/.test ## compare drawn cases with eager training: SECONDS=600, SEED=7, CASE='...', MINIMISE=1
	$(PY) tests/fuzz/fuzz.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case '$(CASE)') \
		$(if $(MINIMISE),--minimise) $(ARGS)

fuzz-cuda: $(CUDA_RUNTIME) ## the same on NCCL ranks, on a CUDA runtime made of CPU threads
	$(ON_CPU_THREADS) $(CUDA_PY) tests/fuzz/fuzz.py --device cuda --backend eager --seconds $(SECONDS) $(ARGS)

sweep: $(SWEEP_VENV)/.done ## compare every architecture of transformers and ten libraries with eager mode
	$(SWEEP_PY) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/benchmarks/sweep.py $(ARGS)

cover: $(VENV)/.test ## run every test and print line coverage
	$(PYTEST) --cov --cov-report=term-missing:skip-covered --cov-fail-under=90 $(PYTEST_ARGS)

docs: out/api.html ## write the API reference, a page of all public names, to out/api.html
	@echo $<

# pdoc makes one page of a package's public names, by its __all__, and reads Google's docstrings.
out/api.html: .ci/api_page.py $(shell find graphshard passes -name '*.py') | $(VENV)/.docs
	$(PY) .ci/api_page.py $@

lint: $(VENV)/.dev ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.dev ## rewrite the sources in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.demo ## measure against fully_shard, paired steps, on two ranks
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/benchmarks/compare_fsdp2.py $(ARGS)

clean: ## remove what the other targets made
	rm -rf .venv .venv-* build dist out *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.base: $(SOURCES)
	@test -n "$(PYTHON)" || { echo "no python found: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=...")'
	@test -x $(PY) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@test -z "$(TORCH)" || { grep -vE '^(torch|torchvision|triton|setuptools)==' constraints.txt; \
		echo torch==$(TORCH); } > $(CONSTRAINTS)
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	@echo "installing graphshard into $(VENV): mostly torch, some hundred MB"
	@$(PIP_INSTALL) -e . numpy
	@touch $@

$(VENV)/.test: $(VENV)/.base
	@echo "installing graphshard and its test tools into $(VENV)"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.demo $(VENV)/.docs

$(VENV)/.docs: $(VENV)/.base
	@echo "installing graphshard and what its API reference needs into $(VENV)"
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $@ $(VENV)/.demo

$(VENV)/.dev: $(VENV)/.base
	@echo "installing graphshard and its development tools into $(VENV)"
	@$(PIP_INSTALL) -e '.[test,dev]'
	@touch $@ $(VENV)/.test $(VENV)/.demo $(VENV)/.docs

$(SWEEP_VENV)/.done: $(SOURCES)
	@test -x $(SWEEP_PY) || $(PYTHON) -m venv $(SWEEP_VENV)
	@echo "installing graphshard and the libraries of the sweep into $(SWEEP_VENV)"
	@$(SWEEP_PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[sweep]'
	@touch $@

$(CUDA_VENV)/.test: $(SOURCES)
	@test -x $(CUDA_PY) || $(PYTHON) -m venv $(CUDA_VENV)
	@echo "installing torch's CUDA build, graphshard and its test tools into $(CUDA_VENV): 4.7 GB"
	@$(CUDA_PY) -m pip --isolated install --quiet --disable-pip-version-check \
		--index-url $(CUDA_INDEX) -c constraints.txt -e '.[test]'
	@touch $@

$(CUDA_RUNTIME): $(CUDA_VENV)/.test $(wildcard tests/cuda_on_cpu/*.cpp tests/cuda_on_cpu/*.h) \
		tests/cuda_on_cpu/make_runtime.py
	@$(CUDA_PY) tests/cuda_on_cpu/make_runtime.py $(@D)
