#!/bin/sh
# nvcc leaves members of an aggregate unset where a conditional operator chooses between two braced lists.
#
# Versions   nvidia-cuda-nvcc 13.5.37 with its NVVM; the same with nvcc 13.0.88; host compiler g++ 12.2
# Behaviour  `x > 1 ? S{x} : S{-x}` of a struct of three floats: in device code b and c, which C++ sets to 0, are never
#            stored. If one list names b, b has its value in both cases. Host code of g++ is right, and so is device
#            code with if and else, with one list alone, with S{} or S(), or if both lists name all members.
# Output     members stored: by a conditional operator 1 of 3, by if and else 3 of 3
# Surprise   The program is valid C++17 without a warning, and rewriting `?:` as if and else changes what it computes.
#            The members hold what memory held before: often 0, so that tests pass, and sometimes another value.

. "$(dirname "$0")/packages.sh"
install_nvcc

members() { # that the kernel stores, if $1 computes s
    cat >kernel.cu <<END
struct S { float a, b, c; };
__global__ void kernel(float x, S *to) {
    S s;
    $1
    *to = s;
}
END
    compile_kernel -std=c++17
    grep -c st.global kernel.ptx || true
}

chosen=$(members "s = x > 1 ? S{x} : S{-x};")
branched=$(members "if (x > 1) s = S{x}; else s = S{-x};")
echo "members stored: by a conditional operator $chosen of 3, by if and else $branched of 3"
[ "$chosen $branched" = "1 3" ]
