#!/bin/sh
# In PyTorch the log-sum-exp of a row without a visible key is 0 or -inf, by kernel, while o is 0 in both.
#
# Versions   torch 2.11.0, a CPU
# Behaviour  The fused CPU kernel behind scaled_dot_product_attention returns lse = 0 for a row that a mask of -inf hides.
#            FlexAttention returns -inf for the same row. Both return o = 0. Other rows agree.
# Output     hidden row: o 0 and 0, lse 0.0 (SDPA) and -inf (FlexAttention)
#            merged with a chunk of one key, whose value is 1: 0.50 by SDPA's lse, 1.00 by FlexAttention's
# Surprise   Whoever merges chunks of keys by their log-sum-exp, as rings do, gives the empty chunk the weight of a score
#            of 0. The result is finite and plausible. o alone does not show it.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0
"$PYTHON" - <<'END'
import sys

import torch
from torch.nn.attention.flex_attention import flex_attention

q, k, v = torch.randn(3, 1, 1, 6, 16)
mask = torch.zeros(6, 6)
mask[3] = -torch.inf
sdpa, sdpa_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
flex, flex_lse = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + mask[i, j], return_lse=True)
sdpa_lse, flex_lse = sdpa_lse.flatten(), flex_lse.flatten()
rest = [0, 1, 2, 4, 5]
same = torch.allclose(sdpa_lse[rest], flex_lse[rest], atol=1e-5)
is_zero = not sdpa[0, 0, 3].any() and not flex[0, 0, 3].any()
print(f"hidden row: o {sdpa[0, 0, 3].sum():g} and {flex[0, 0, 3].sum():g}, "
      f"lse {sdpa_lse[3].item()} (SDPA) and {flex_lse[3].item()} (FlexAttention)")
# The other chunk has one key with the score 0 and the value 1, so its lse is 0 and its o 1.
merged = [1 / (1 + lse[3].exp()).item() for lse in (sdpa_lse, flex_lse)]
print(f"merged with a chunk of one key, whose value is 1: {merged[0]:.2f} by SDPA's lse, {merged[1]:.2f} by FlexAttention's")
sys.exit(not (same and is_zero and sdpa_lse[3] == 0 and flex_lse[3] == -torch.inf))
END
