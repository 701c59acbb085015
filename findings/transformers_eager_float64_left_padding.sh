#!/bin/sh
# A float64 model of transformers with eager attention gives NaN for every token of a row with padding on the left.
#
# Versions   transformers 5.24.0, torch 2.11.0, a CPU
# Behaviour  The mask holds torch.finfo(float64).min, the softmax is computed in float32, where that number is -inf.
#            The rows of padding have nothing else, so they are NaN, and as keys of weight 0 they make the tokens NaN
#            in the next layer. In float32, or with "sdpa" in float64, all is finite. Without padding eager is right.
# Output     share of the tokens' logits that are finite, and their error against float64 sdpa
#            float32 eager 1.00 (1e-07), float64 sdpa 1.00, float64 eager 0.62
# Surprise   float64 with eager is what one takes for a reference. Rows without padding stay right (8 of the 13 tokens), so
#            a check of one row passes. And the softmax of the float64 reference is one of float32.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 transformers==5.24.0
"$PYTHON" - <<'END'
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(0, 50, (2, 8))
mask = torch.tensor([[1] * 8, [0, 0, 0] + [1] * 5])  # 8 tokens and 5
logits = {}
for dtype in (torch.float32, torch.float64):
    for name in ("eager", "sdpa"):
        model.to(dtype).set_attn_implementation(name)
        with torch.no_grad():
            logits[dtype, name] = model(ids, attention_mask=mask).logits[mask.bool()].double()
share = {key: float(x.isfinite().double().mean()) for key, x in logits.items()}
expected = logits[torch.float64, "sdpa"]
error = float((logits[torch.float32, "eager"] - expected).norm() / expected.norm())
print(
    f"float32 eager {share[torch.float32, 'eager']:.2f} ({error:.0e}), float64 sdpa "
    f"{share[torch.float64, 'sdpa']:.2f}, float64 eager {share[torch.float64, 'eager']:.2f}"
)
assert share[torch.float32, "eager"] == share[torch.float64, "sdpa"] == 1 and error < 1e-5
assert share[torch.float64, "eager"] < 1
END
