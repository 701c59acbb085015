#!/usr/bin/env bash
# .github/build_wheel.sh 2.11 builds a wheel for that torch into dist/, with CUDA code for all architectures or for those of
# TORCH_CUDA_ARCH_LIST, by the `python` on PATH. pip's index, or PIP_EXTRA_INDEX_URL, decides for which CUDA that torch is;
# PyPI has nvcc from 13.0 on.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pip install "torch==$1.*" "setuptools>=77,<82" ninja build
python -m pip install $(python -c 'import bootstrap, torch; print(*(f"{name}=={torch.version.cuda}.*" for name in bootstrap.NVCC))')
export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-7.5 8.0 8.6 8.9 9.0 10.0 12.0+PTX}" MINIMAL_ATTN_WHEEL=1
python -m build --wheel --no-isolation
ls -l dist
