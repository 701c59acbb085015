#!/bin/sh
# PhiMoE and Qwen2-MoE in transformers don't give their sliding window to the attention function.
#
# Versions   transformers 5.24.0, torch 2.11.0, a CPU. FlashAttention needs a GPU: a function registered by
#            AttentionInterface, with the mask function of "flash_attention_2", computes what its arguments say.
# Behaviour  Mistral, Mixtral and Qwen2 call the function with sliding_window=W. PhiMoE (the class of Phi-3.5-MoE) and
#            Qwen2-MoE call it without, also where their config sets a window (by default it sets none). "eager" and
#            "sdpa" have the window in their mask. The mask of "flash_attention_2" is None or tells of padding, so that
#            has the argument alone. Without it, each token sees all earlier ones. With a cache and one token a call the
#            window is right: the cache drops the keys behind it.
# Output     window 5, 2 layers: the argument, and the error of the logits of 12 tokens against eager
#            mistral got [5, 5]: in one call 2.9e-07, one at a time 4.1e-07
#            mixtral got [5, 5]: in one call 3.8e-07, one at a time 6.3e-07
#            qwen2 got [5, 5]: in one call 3.0e-07, one at a time 4.5e-07
#            phimoe got [None, None]: in one call 6.6e-01, one at a time 7.1e-07
#            qwen2_moe got [None, None]: in one call 6.7e-01, one at a time 7.3e-07
# Surprise   The window is in the config, "eager" and "sdpa" honour it, and attn_implementation is taken for a choice of
#            speed. Training and long prompts have no window, tokens generated one by one do. No error is raised.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 transformers==5.24.0
"$PYTHON" - <<'END'
import torch
import transformers
from transformers.masking_utils import flash_attention_mask

transformers.logging.set_verbosity_error()
W, N = 5, 12
got = []


def attention(module, q, k, v, mask, scaling, sliding_window=None, **_):
    assert mask is None  # so nothing but the argument tells of a window
    got.append(sliding_window)
    keys = torch.arange(k.shape[2])
    distance = keys[-q.shape[2] :, None] - keys
    visible = (distance >= 0) & (distance < (sliding_window or N))
    values = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=scaling, enable_gqa=True)
    return values.transpose(1, 2), None


def error(x, expected):
    return float((x - expected).norm() / expected.norm())


transformers.AttentionInterface.register("recorded", attention)
transformers.AttentionMaskInterface.register("recorded", flash_attention_mask)
size = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
size |= dict(num_key_value_heads=2, sliding_window=W, initializer_range=0.2)
layers = dict(use_sliding_window=True, layer_types=["sliding_attention"] * 2)
configs = {
    "mistral": transformers.MistralConfig(**size),
    "mixtral": transformers.MixtralConfig(**size, num_local_experts=2),
    "qwen2": transformers.Qwen2Config(**size, **layers),
    "phimoe": transformers.PhimoeConfig(**size, num_local_experts=2),
    "qwen2_moe": transformers.Qwen2MoeConfig(**size, **layers, num_experts=2, num_experts_per_tok=2),
}
for name, config in configs.items():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 50, (1, N))
    logits = {}
    with torch.no_grad():
        for implementation in ("eager", "sdpa", "recorded"):
            model.set_attn_implementation(implementation)
            got.clear()
            logits[implementation] = model(ids).logits[0]
        windows = list(got)
        cache = transformers.DynamicCache(config=config)
        steps = torch.cat([model(token, cache=cache).logits[0] for token in ids.split(1, dim=1)])
    at_once, one_by_one = error(logits["recorded"], logits["eager"]), error(steps, logits["eager"])
    print(f"{name} got {windows}: in one call {at_once:.1e}, one at a time {one_by_one:.1e}")
    assert error(logits["sdpa"], logits["eager"]) < 1e-5 and one_by_one < 1e-5
    assert error(logits["recorded"][:W], logits["eager"][:W]) < 1e-5  # the window hides nothing from these
    if name in ("phimoe", "qwen2_moe"):
        assert windows == [None, None] and at_once > 0.1
    else:
        assert windows == [W, W] and at_once < 1e-5
END
