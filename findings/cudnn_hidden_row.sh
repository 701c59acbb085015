#!/bin/sh
# On a Hopper GPU, scaled_dot_product_attention gives a row that a bool mask hides the softmax over all keys.
#
# Versions   torch 2.11.0+cu130, cuDNN 9.19.0, one H100 80GB, one H200
# Behaviour  PyTorch chooses cuDNN's kernel by default for half types with a mask on Hopper. In it a row of False sees
#            every key, as if it had no mask. A row of -inf is 0, and so are both in the memory-efficient kernel and on
#            a CPU.
# Output     hidden row by default: bool the softmax over all keys, -inf 0
#            memory-efficient kernel: bool 0, -inf 0
# Surprise   PyTorch documents a bool mask by its -inf form. The row is finite and looks like attention without a mask,
#            so padded queries carry what was to be hidden.

. "$(dirname "$0")/packages.sh"
[ -e /dev/nvidiactl ] || { echo "not tried: needs a Hopper GPU"; exit 77; }
packages torch==2.11.0
"$PYTHON" - <<'END'
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    print("not tried: needs a Hopper GPU")
    sys.exit(77)
q, k, v = torch.randn(3, 2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
seen = torch.ones(128, 128, dtype=torch.bool, device="cuda")
seen[5] = False
added = torch.zeros(128, 128, dtype=torch.bfloat16, device="cuda").masked_fill(~seen, -torch.inf)
unmasked = (q.double() @ k.double().mT / 8).softmax(-1) @ v.double()


def hidden_row(mask):
    row = scaled_dot_product_attention(q, k, v, mask)[:, :, 5].double()
    if not row.any():
        return "0"
    return "the softmax over all keys" if (row - unmasked[:, :, 5]).abs().max() < 0.05 else "other"


by_default = [hidden_row(mask) for mask in (seen, added)]
print(f"hidden row by default: bool {by_default[0]}, -inf {by_default[1]}")
with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
    efficient = [hidden_row(mask) for mask in (seen, added)]
print(f"memory-efficient kernel: bool {efficient[0]}, -inf {efficient[1]}")
assert by_default == ["the softmax over all keys", "0"] and efficient == ["0", "0"]
END
