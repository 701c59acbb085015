#!/bin/sh
# Falcon with ALiBi: "eager" adds it twice, and so does "sdpa" if it is asked for the attentions.
#
# Versions   transformers 5.24.0, torch 2.11.0, a CPU.
# Behaviour  FalconModel writes ALiBi into the mask, whatever the implementation. "sdpa" adds this mask to the scores.
#            "eager" adds ALiBi, and then the mask. With output_attentions=True "sdpa" takes the way of "eager".
#            Akin: https://github.com/huggingface/transformers/issues/29946 (closed in 2024: the same symptom in 4.39,
#            where "sdpa" was wrong, its mask not causal, and "eager" right)
# Output     the heads of a layer for 40 tokens against float64 with ALiBi once and twice, the logits against "sdpa"
#            sdpa: once 1e-07, twice 8e-02; logits 0e+00
#            sdpa, output_attentions: once 8e-02, twice 1e-07; logits 3e-02
#            eager: once 8e-02, twice 1e-07; logits 3e-02
#            eager, one token at a time: once 8e-02, twice 1e-07; logits 3e-02
# Surprise   "eager" is what the faster implementations are compared with, and here it is the one that is wrong. Asking
#            for the attentions changes the logits. The attentions sum to 1 and agree with those logits, but they are
#            not those of the model that answers without them. No error is raised.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 transformers==5.24.0
"$PYTHON" - <<'END'
import torch
import transformers

transformers.logging.set_verbosity_error()
N, H, D = 40, 4, 16
size = dict(vocab_size=99, hidden_size=H * D, num_hidden_layers=1, num_attention_heads=H, alibi=True)
ids = torch.randint(99, (1, N), generator=torch.Generator().manual_seed(0))


def error(x, expected):
    return float((x - expected).norm() / expected.norm())


def run(implementation, chunk, **options):
    torch.manual_seed(0)  # so each model has the same weights
    config = transformers.FalconConfig(**size, initializer_range=0.15)
    model = transformers.FalconForCausalLM._from_config(config, attn_implementation=implementation).eval()
    layer = model.transformer.h[0].self_attention
    projected, heads = [], []
    layer.query_key_value.register_forward_hook(lambda *args: projected.append(args[2]))
    layer.dense.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        logits = torch.cat([model(x, cache=cache, **options).logits for x in ids.split(chunk, dim=1)], dim=1)
    return torch.cat(projected, dim=1)[0].double(), torch.cat(heads, dim=1)[0].double(), logits


def attention(projected, times):  # all heads have the same key and value
    q, k, v = projected.split((H * D, D, D), dim=1)
    slopes = 4.0 ** -torch.arange(1, H + 1).double()
    scores = q.view(N, H, D).transpose(0, 1) @ k.T + times * slopes[:, None, None] * torch.arange(N)
    weights = (scores / D**0.5).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


expected = run("sdpa", N)[2]
for name, times, call in (
    ("sdpa", 1, run("sdpa", N)),
    ("sdpa, output_attentions", 2, run("sdpa", N, output_attentions=True)),
    ("eager", 2, run("eager", N)),
    ("eager, one token at a time", 2, run("eager", 1)),
):
    projected, heads, logits = call
    errors = {n: error(heads, attention(projected, n)) for n in (1, 2)}
    changed = error(logits, expected)
    print(f"{name}: once {errors[1]:.0e}, twice {errors[2]:.0e}; logits {changed:.0e}")
    assert errors[times] < 1e-5 and errors[3 - times] > 0.05
    assert changed > 0.02 if times == 2 else changed < 1e-5
END
