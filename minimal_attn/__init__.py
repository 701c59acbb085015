"""FlashAttention (Dao et al. 2022), small enough to read and fast enough to use."""

from minimal_attn import _operator_rules
from minimal_attn._backward import backward
from minimal_attn._dropout import dropout_mask
from minimal_attn._fallback import FallbackWarning
from minimal_attn._forward import Explanation, explain, forward
from minimal_attn._merge import merge
from minimal_attn.sdpa import (
    Activation,
    activate,
    explain_scaled_dot_product_attention,
    scaled_dot_product_attention,
)

__all__ = [
    "Activation",
    "Explanation",
    "FallbackWarning",
    "activate",
    "backward",
    "dropout_mask",
    "explain",
    "explain_scaled_dot_product_attention",
    "forward",
    "merge",
    "scaled_dot_product_attention",
]
__version__ = "0.1.0"

_operator_rules.register()
