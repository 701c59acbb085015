"""FlashAttention's forward pass (Dao et al. 2022), small enough to read and fast enough to use."""

from minimal_attn import _torch
from minimal_attn._forward import Explanation, explain, forward

__all__ = ["Explanation", "explain", "forward"]
__version__ = "0.1.0"

_torch.register()
