#!/bin/sh
# On CUDA, a bias that alone needs a gradient makes scaled_dot_product_attention's backward pass fail.
#
# Versions   torch 2.11.0+cu130, one H200
# Behaviour  With attn_mask.requires_grad and frozen q, k, v the forward pass takes the memory-efficient kernel without
#            the log-sum-exp, since only q, k and v are asked whether they need a gradient. The backward pass then
#            raises. If q needs a gradient, too, the bias gets the right one. On a CPU it always does.
# Output     bias alone: RuntimeError: LSE is not correctly aligned (strideH)
#            with q: max error 0.00
# Surprise   A learned bias beside a frozen model is a usual way to adapt it. The message is about memory alignment,
#            which has nothing to do with it.

. "$(dirname "$0")/packages.sh"
[ -e /dev/nvidiactl ] || { echo "not tried: needs a CUDA GPU"; exit 77; }
packages torch==2.11.0
"$PYTHON" - <<'END'
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    print("not tried: needs a CUDA GPU since Ampere")
    sys.exit(77)
q, k, v = torch.randn(3, 2, 4, 64, 64, device="cuda")
bias = torch.zeros(2, 4, 64, 64, device="cuda", requires_grad=True)
said = "no error"
try:
    scaled_dot_product_attention(q, k, v, bias).sum().backward()
except RuntimeError as error:
    said = f"RuntimeError: {str(error).splitlines()[0]}"
print("bias alone:", said)

p = (q.double() @ k.double().mT / 8).softmax(-1)
dP = v.double().sum(-1)[:, :, None].expand_as(p)  # of a loss that is the sum of the output
exact = p * (dP - (p * dP).sum(-1, keepdim=True))
[of_bias] = torch.autograd.grad(scaled_dot_product_attention(q.requires_grad_(), k, v, bias).sum(), bias)
error = (of_bias - exact).abs().max().item()
print(f"with q: max error {error:.2f}")
assert "LSE is not correctly aligned" in said and error < 0.01
END
