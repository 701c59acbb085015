#!/bin/sh
# In FlashAttention-3 and -4 a NaN in one packed document makes the document before it NaN.
#
# Versions   fa3-fwd 0.0.3, flash-attn-4 4.0.0b36 (each with torch 2.11.0), one H100 80GB
# Behaviour  flash_attn_varlen_func loads whole tiles of keys, so a document's last tile holds keys of the next one.
#            Their weights are 0, and 0 times a NaN in V is NaN. cu_seqlens hides finite values only.
# Output     fa3-fwd 0.0.3: the document before the NaN is finite: False
#            flash-attn-4 4.0.0b36: the document before the NaN is finite: False
# Surprise   Documents of a packed batch are taken for independent. One bad sample spoils its neighbour, so a search
#            for it by documents finds two.
#
# flash_attention_nan_of_the_next_document.sh [fa3-fwd==0.0.3 | flash-attn-4==4.0.0b36]    one of the two alone

. "$(dirname "$0")/packages.sh"
[ -e /dev/nvidiactl ] || { echo "not tried: needs a Hopper GPU"; exit 77; }
for peer in ${1:-fa3-fwd==0.0.3 flash-attn-4==4.0.0b36}; do
    packages torch==2.11.0 "$peer"
    "$PYTHON" - "$peer" <<'END'
import sys

import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    print("not tried: needs a Hopper GPU")
    sys.exit(77)
name, version = sys.argv[1].split("==")
if name == "fa3-fwd":
    from fa3_fwd_interface import flash_attn_varlen_func
else:
    from flash_attn.cute import flash_attn_varlen_func

lengths = 100, 60
q, k, v = torch.randn(3, sum(lengths), 4, 128, device="cuda", dtype=torch.bfloat16)
ends = torch.tensor([0, 100, 160], dtype=torch.int32, device="cuda")


def first_document():
    bounds = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=100, max_seqlen_k=100)
    out = flash_attn_varlen_func(q, k, v, causal=True, **bounds)
    return (out[0] if isinstance(out, tuple) else out)[:100]


assert first_document().isfinite().all()
v[100:] = torch.nan
finite = bool(first_document().isfinite().all())
print(f"{name} {version}: the document before the NaN is finite: {finite}")
assert not finite
END
done
