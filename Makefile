# Lowtide's commands. `make` alone lists them.
#
# build, test and demo install what they need: packages by apt (as root), torch and tools into an environment inside the tree.
# test-gpu and bench install nothing and use the python3 whose torch is already there.

SHELL := bash
.SHELLFLAGS := -o pipefail -c

TORCH  ?= 2.11.0
JOBS   ?= $(shell nproc)
PYTHON ?= python3
export JOBS PYTHON

DEFAULT_TORCH := 2.11.0
SUFFIX := $(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(TORCH))
VENV   ?= .venv$(SUFFIX)
BUILD  ?= build$(SUFFIX)

SOURCES = $(shell find allocator pool python tests bench examples -name '*.cpp' -o -name '*.h' -o -name '*.cu')
SANITIZER_PYTHON = $(if $(wildcard $(VENV)/bin/python),-DLOWTIDE_PYTHON=$(abspath $(VENV)/bin/python))

.DEFAULT_GOAL := help
.PHONY: help
help: ## list the commands
	@echo "make <command> [TORCH=2.15.0] [PYTHON=python3] [JOBS=n]"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: environment
environment:
	@scripts/bootstrap.sh build python
	@scripts/environment.sh $(VENV) $(TORCH)

.PHONY: build
build: environment ## install what is missing, build the libraries, tests and Python package
	@scripts/build.sh $(VENV) $(BUILD)
	@echo "==> done: $(VENV)/bin/python -c 'import lowtide'"

.PHONY: test
test: build ## build, then run the C++ tests, the Python tests and the C++ example
	@echo "==> C++ tests and example"
	@ctest --test-dir $(BUILD) --parallel $(JOBS) --output-on-failure --no-tests=error
	@echo "==> include rules"
	@$(VENV)/bin/python tests/layering_test.py
	@echo "==> Python tests"
	@$(VENV)/bin/python -m pytest tests/python -n $(JOBS)

.PHONY: demo
demo: build ## build, then train with and without eviction and draw memory_timeline.png
	@echo "==> examples/train.py"
	@$(VENV)/bin/python examples/train.py

.PHONY: test-gpu
test-gpu: ## on a GPU machine: every suite on CUDA, and compute-sanitizer
	@scripts/gpu.sh test

.PHONY: stress-gpu
stress-gpu: ## on a GPU machine: five minutes of threads, streams and regions; ends with what is left over, which is nothing
	@scripts/gpu.sh stress

.PHONY: bench
bench: ## on a GPU machine: the benchmarks
	@scripts/gpu.sh bench

.PHONY: asan tsan
asan: ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
tsan: ## C++ tests under ThreadSanitizer
asan tsan:
	@scripts/bootstrap.sh build
	@echo "==> building in build-$@ ($(JOBS) jobs)"
	@cmake --preset $@ $(SANITIZER_PYTHON) > /dev/null
	@cmake --build --preset $@ --parallel $(JOBS) | { grep -vE '^\[[0-9]+/[0-9]+\] |^ninja: no work' || true; }
	@echo "==> C++ tests under $@"
	@scripts/without_aslr.sh ctest --preset $@ --parallel $(JOBS)

.PHONY: format format-check
format: ## format the C++ sources
	@scripts/bootstrap.sh format
	@clang-format -i $(SOURCES)
format-check: ## fail where the C++ sources are not formatted
	@scripts/bootstrap.sh format
	@clang-format --dry-run --Werror $(SOURCES)

.PHONY: tidy
tidy: build ## clang-tidy over the torch-free core
	@scripts/bootstrap.sh tidy
	@clang-tidy -p $(BUILD) --quiet $(wildcard allocator/*.cpp pool/*.cpp)

.PHONY: thread-safety
thread-safety: ## clang's analysis of the lock annotations; after `make build`
	@scripts/bootstrap.sh clang
	@python3 scripts/thread_safety.py $(BUILD)

.PHONY: clean
clean: ## remove the build folders (environments stay)
	rm -rf build build-* dist memory_timeline.png
