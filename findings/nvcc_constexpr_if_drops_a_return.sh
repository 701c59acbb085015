#!/bin/sh
# nvcc drops the rest of a lambda behind `if constexpr` of a loop that isn't in braces, and the kernel becomes empty.
#
# Versions   nvidia-cuda-nvcc 13.5.37 with its NVVM; the same with nvcc 13.0.88; host compiler g++ 12.2
# Behaviour  In a lambda of a template, `if constexpr (false) for (...) { ... } return x;` loses the return: in device
#            code what follows is undefined, and a kernel that stores the result is a bare `ret`. Warning 940 names a
#            missing return. Without `-> int` the lambda returns void, an error. Host code of g++ is right. Braces
#            around the loop, or a loop whose body has none, make it right. clang and g++ accept all forms.
# Output     stores of the kernel: loop without braces 0, with braces 1
# Surprise   The program is valid C++17, and adding braces changes what it computes. It compiles, runs and leaves the
#            result's memory as it was.

. "$(dirname "$0")/packages.sh"
install_nvcc

stores() { # of a kernel in which the loop begins with $1 and ends with $2
    cat >kernel.cu <<END
template <class T>
__device__ int doubled(int n) {
    const auto f = [&](int x) -> int {
        if constexpr (sizeof(T) == 8) $1
            for (; x < n; ++x) {
                if (x == 5) break;
            }
        $2
        return 2 * x;
    };
    return f(n);
}
__global__ void kernel(int n, int *to) { *to = doubled<float>(n); }
END
    compile_kernel -std=c++17 -w
    grep -c st.global kernel.ptx || true
}

without=$(stores "" "") with=$(stores "{" "}")
echo "stores of the kernel: loop without braces $without, with braces $with"
[ "$without $with" = "0 1" ]
