#!/bin/sh
# nvcc -Ofast-compile min (-Ofc), the mildest level, compiles warp-specialised kernels without setmaxnreg.
#
# Versions   nvidia-cuda-nvcc 13.5.37 with its NVVM and cuobjdump 13.5.37; the same with nvcc 13.0.88; sm_90a
# Behaviour  At each level but 0 ptxas ignores setmaxnreg in every kernel, also in one without a call, as here by min. It tells so
#            in a line of "info" (C7504), which speaks of other compilation units; the exit status is 0. PTX still has
#            both instructions.
# Output     setmaxnreg in machine code: plain 2, level 0 2, min 0, mid 0, max 0
# Surprise   nvcc --help says that min has a minimal impact on run time. A kernel for Hopper whose producers give their
#            registers to its consumers then has as many for each: with 384 threads 168, where consumers ask for 240 to
#            hold their accumulators. The option seems to be about optimisations alone, but these two instructions are
#            the program's own.

. "$(dirname "$0")/packages.sh"
install_nvcc
"$PYTHON" -m pip install --quiet --root-user-action=ignore --target tools nvidia-cuda-cuobjdump==13.5.37 \
    nvidia-cuda-nvdisasm==13.5.37 || {
    echo "not tried: pip can't install cuobjdump"
    exit 77
}

cat >kernel.cu <<'END'
template <int Count>
__device__ float chains(const float *in, int steps) { // Count numbers in registers
    float x[Count], sum = 0;
    for (int i = 0; i < Count; ++i) x[i] = in[threadIdx.x * Count + i];
    for (int n = 0; n < steps; ++n)
#pragma unroll
        for (int i = 0; i < Count; ++i) x[i] = fmaf(x[i], x[i], x[(i + 1) % Count]);
    for (int i = 0; i < Count; ++i) sum += x[i];
    return sum;
}
__global__ void __launch_bounds__(256, 1) kernel(const float *in, float *out, int steps) {
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        out[threadIdx.x] = chains<8>(in, steps);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        out[threadIdx.x] = chains<64>(in, steps);
    }
}
END

changes() { # of the number of registers that the machine code has
    PATH=$cuda/bin:$cuda/nvvm/bin:$PATH "$cuda/bin/nvcc" -arch=sm_90a "-I$cuda/include" "$@" -cubin -o kernel.cubin kernel.cu 2>log ||
        { cat log; exit 1; }
    PATH=$(dirname "$(find "$PWD/tools" -name nvdisasm -type f)"):$PATH cuobjdump -sass kernel.cubin >sass
    grep -c USETMAXREG sass || true
}

found="plain $(changes), level 0 $(changes -Ofc 0)"
for level in min mid max; do found="$found, $level $(changes -Ofc "$level")"; done
echo "setmaxnreg in machine code: $found"
[ "$found" = "plain 2, level 0 2, min 0, mid 0, max 0" ]
