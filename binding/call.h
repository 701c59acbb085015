// call.h: a call from checked arguments to a backend's launch. overload.h (the operators) and sdpa.h make calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding/arguments.h"
#include "flash.h"

namespace minimal_attn {

// What the caller gets: o alone, o and the log-sum-exp, or the state (o, l, m) with o in float32.
enum class Returns { o, lse, state };

struct Results {
    Tensor o, l, m, lse;
};

// Checks a call and computes it. `out` is checked and written. Tensors in `results` are written unchecked. What neither
// has is allocated.
Results run(const Arguments &a, Returns returns, const Tensor *out = nullptr, Results results = {});

// The same for gradients. Of `results`, too, what is missing is allocated. If `dbias` is given, it becomes the gradient
// of what is added to scores, bias or an additive attn_mask, in its shape and dtype.
Gradients differentiate(const Arguments &a, const Tensor &do_, const Tensor &o, const Tensor &lse,
                        const MaybeTensor &dlse, std::optional<at::ScalarType> out_dtype, Gradients results = {},
                        Tensor *dbias = nullptr);

// Whether our kernel for the gradients of tensors like q, (B, H, N, d), is as fast as PyTorch's. If not, a drop-in lets
// PyTorch compute them.
bool has_fast_backward(const Tensor &q);

// Whether calls like q's with an attn_mask or a bias are as fast as PyTorch's that take one: on a CPU, and in half
// types on a Hopper GPU.
bool has_fast_pairs(const Tensor &q);

// What run, or with `backward` differentiate, would do: it checks the arguments and launches nothing.
struct Explanation {
    std::string backend;
    Plan plan;
    const char *prefix_kernel;                                // of the second part, with prefix_k; else null
    const char *mask;                                         // what follows the kernel's name: which tables it reads
    std::vector<std::string> copied;                          // of q, k and v
    std::vector<std::pair<std::string, std::string>> others;  // why each other backend isn't taken
};
Explanation explain(const Arguments &a, Returns returns, const Tensor *out, bool backward);

// ---------------------------------------------------------------------------------------------- this build

std::vector<std::string> backend_names();  // the fastest of each device first
const char *cuda_architectures();          // what CUDA code was compiled for; empty in a build without
bool has_all_tiles();                      // whether portable can run each of its tiles here; kOnHopperAlone (device.h)
int limit_shared_memory(int bytes);        // of a block, as on a smaller GPU; returns the last limit

}  // namespace minimal_attn
