# On a fresh machine with Python 3.10 or newer and a C++ compiler:
#
#   make bench    profile manual attention and minimal_attn and compare their values; make bench ARGS=--help
#   make test     run the tests; make test ARGS="-k causal"
#   make build    compile only, beside the sources; TORCH_CUDA_ARCH_LIST says for what GPUs (see setup.py)
#   make lint     check the formatting; make format mends it
#   make clean    remove what was built; .venv, where missing packages were installed, stays
#
# PYTHON=... names the Python to use instead of the one on PATH. bootstrap.py says when .venv is made.

PYTHONS := python3 python3.12 python3.11 python3.10 python3.13 python3.14 python $(PYTHON)
BOOTSTRAP := $(firstword $(foreach name,$(PYTHONS),$(shell command -v $(name) 2>/dev/null)))
NO_PYTHON = $(error minimal_attn: no Python here: install python3, 3.10 or newer)

.PHONY: build bench test lint format clean FORCE
.NOTPARALLEL:

build: build/built

bench: build
	build/python bench.py $(ARGS)

# Most tests use one core. More processes than 4 want more memory than a GPU may have.
PROCESSES = $(shell build/python -c 'import xdist; print("-n auto --maxprocesses 4")' 2>/dev/null)

test: build
	build/python -m pytest $(PROCESSES) $(ARGS)

build/built: build/configuration $(if $(wildcard minimal_attn/_C*.so),,FORCE)
	@build/python -W ignore setup.py -q build_ext --inplace
	@touch $@

# Looked at every time, and rewritten only where the sources or something else ask for a new build.
build/configuration: FORCE
	@$(or $(BOOTSTRAP),$(NO_PYTHON)) bootstrap.py $(or $(filter test,$(MAKECMDGOALS)),build)

lint:
	@$(or $(BOOTSTRAP),$(NO_PYTHON)) bootstrap.py lint
	build/python -m ruff check
	build/python -m ruff format --check
	build/python bootstrap.py clang-format --dry-run -Werror

format:
	@$(or $(BOOTSTRAP),$(NO_PYTHON)) bootstrap.py lint
	build/python -m ruff check --fix
	build/python -m ruff format
	build/python bootstrap.py clang-format -i

clean:
	rm -rf build *.egg-info minimal_attn/_C*.so
