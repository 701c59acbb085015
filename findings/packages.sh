# Sourced by each finding. `packages NAME==VERSION ...` lets $PYTHON import these: as they are where this
# Python has them, else by pip from PyPI into a folder that is removed at the end.
# A finding's status: 0 as described, 77 not tried (no network, no GPU), anything else: the behaviour changed.

set -eu
PYTHON=${PYTHON:-python3}
here=${PYTHONPATH:-}
folders=$(mktemp -d)
trap 'rm -rf "$folders"' EXIT
cd "$folders"

packages() {
    export PYTHONPATH="$here"
    missing=$("$PYTHON" - "$@" <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version

for package in sys.argv[1:]:
    name, number = package.split("==")
    try:
        found = version(name.split("[")[0]).split("+")[0]
    except PackageNotFoundError:
        found = None
    if found != number:
        print(package)
END
    )
    [ -n "$missing" ] || return 0
    folder=$(mktemp -d "$folders/XXXXXX")
    printf '%s\n' "$@" | sed 's/\[.*\]//' >"$folder.txt" # of what the missing ones depend on
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet --root-user-action=ignore -c "$folder.txt" --target "$folder" $missing || {
        echo "not tried: pip can't install" $missing
        exit 77
    }
    export PYTHONPATH="$folder${here:+:$here}"
}

# nvcc 13.5.37 from PyPI, which needs g++.
install_nvcc() {
    command -v g++ >/dev/null || { echo "not tried: needs g++"; exit 77; }
    "$PYTHON" -m pip install --quiet --root-user-action=ignore --target nvcc nvidia-cuda-nvcc==13.5.37 \
        nvidia-nvvm==13.5.37 nvidia-cuda-crt==13.5.37 nvidia-cuda-runtime==13.5.37 nvidia-cuda-cccl==13.3.5.0.6 || {
        echo "not tried: pip can't install nvcc"
        exit 77
    }
    cuda=$PWD/nvcc/nvidia/cu13
}

# `compile_kernel FLAGS` makes kernel.ptx of kernel.cu.
compile_kernel() {
    PATH=$cuda/bin:$cuda/nvvm/bin:$PATH "$cuda/bin/nvcc" "$@" "-I$cuda/include" -ptx -o kernel.ptx kernel.cu
}
