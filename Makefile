# On a fresh machine with Python 3.10 or newer and a C++ compiler:
#
#   make bench    profile manual attention and minimal_attn and compare their values; make bench ARGS=--help
#   make test     run the tests; make test ARGS="-k causal"
#   make build    compile only, beside the sources; TORCH_CUDA_ARCH_LIST says for what GPUs (see setup.py)
#   make lint     check the formatting
#   make clean    remove what was built; .venv, where missing packages were installed, stays
#
# PYTHON=... names the Python to use instead of the one on PATH. bootstrap.py says when .venv is made.

PYTHONS := python3 python3.12 python3.11 python3.10 python3.13 python3.14 python
BOOTSTRAP := $(or $(PYTHON),$(firstword $(foreach name,$(PYTHONS),$(shell command -v $(name) 2>/dev/null))))
FOLDERS := ./ cpu/ portable/ hopper/ hopper/float32/
SOURCES := $(foreach folder,$(FOLDERS),$(wildcard $(addprefix $(folder)*.,cpp cu cuh h))) setup.py bootstrap.py

.PHONY: build bench test lint clean FORCE
.NOTPARALLEL:

build: build/built

bench: build
	build/python bench.py $(ARGS)

test: build
	build/python -m pytest $(ARGS)

build/built: $(SOURCES) build/configuration $(if $(wildcard minimal_attn/_C*.so),,FORCE)
	@build/python -W ignore setup.py -q build_ext --inplace
	@touch $@

# Looked at every time, and touched only where something else than the sources asks for a new build.
build/configuration: FORCE
	@$(if $(BOOTSTRAP),,$(error minimal_attn: no Python here: install python3, 3.10 or newer))
	@$(BOOTSTRAP) bootstrap.py $(or $(filter test,$(MAKECMDGOALS)),build)

lint:
	@$(BOOTSTRAP) bootstrap.py lint
	build/python -m ruff check
	build/python -m ruff format --check
	if command -v clang-format; then clang-format --dry-run -Werror $(filter %.cpp %.cu %.cuh %.h,$(SOURCES)); fi

clean:
	rm -rf build *.egg-info minimal_attn/_C*.so
