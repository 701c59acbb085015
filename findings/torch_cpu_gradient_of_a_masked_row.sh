#!/bin/sh
# A row masked by finfo.min everywhere: SDPA's fused CPU kernel computes the right values and wrong gradients.
#
# Versions   torch 2.11.0, a CPU, float32
# Behaviour  A mask that is finfo.min for all N keys of a row makes its softmax uniform, and the output is the mean of V.
#            The backward pass computes P = exp(S - log-sum-exp) again. log(N) is lost beside finfo.min, so every P is
#            1 in place of 1 / N: dV is N times too large, and dQ is nowhere near. The math path keeps P and is right.
#            Rows around 1e30 or any other large constant do the same.
# Output     mean of V, error 0.0
#            dV / exact: fused 64.0, math 1.0
#            dQ, relative error: fused 6.3e+01, math 1.4e-07
# Surprise   Models mask by finfo.min because -inf gives NaN in such a row. The loss is right, so only a comparison of
#            gradients shows it. And a constant that is added to a whole row changes no probability.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0
"$PYTHON" - <<'END'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
N = 64
q, k, v, weight = (torch.randn(1, 1, n, 16) for n in (1, N, N, 1))
mask = torch.full((1, N), torch.finfo(torch.float32).min)


def gradients(backend, dtype=torch.float32, mask=mask):
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(*leaves, attn_mask=mask.to(dtype))
    dq, _, dv = torch.autograd.grad(o, leaves, weight.to(dtype))
    return o.double(), dq.double(), dv.double()


# The mask rounds float32 scores away, so exact is softmax of zeros: P = 1 / N.
mean, dv_exact = v.double().mean(2, keepdim=True), weight.double().expand(1, 1, N, 16) / N
dP = weight.double() @ v.double().mT
dq_exact = ((dP - dP.mean()) / N) @ k.double() / 4
fused, math = gradients(SDPBackend.FLASH_ATTENTION), gradients(SDPBackend.MATH)
print(f"mean of V, error {(fused[0] - mean).abs().max().item():.1f}")
ratios = [(x[2] / dv_exact).mean().item() for x in (fused, math)]
print("dV / exact: fused {:.1f}, math {:.1f}".format(*ratios))
errors = [((x[1] - dq_exact).norm() / dq_exact.norm()).item() for x in (fused, math)]
print("dQ, relative error: fused {:.1e}, math {:.1e}".format(*errors))
assert (fused[0] - mean).abs().max() < 1e-5 and abs(ratios[0] - N) < 0.1 and abs(ratios[1] - 1) < 1e-4
assert errors[0] > 1 and errors[1] < 1e-5
END
