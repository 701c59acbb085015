#!/bin/sh
# LitGPT's sliding window: chunked prefill, as its own error message advises it, sees the future.
#
# Versions   litgpt 0.5.13, lightning 2.6.6, torch 2.11.0, a CPU.
# Behaviour  A layer with a window W has a ring of W keys as its cache. A call of more than W tokens raises ValueError:
#            it would violate causality, and the way out would be chunks of at most W tokens. But a chunk is in the ring
#            before its tokens attend, so it has replaced keys of their window. And the mask is the first W columns of
#            the causal one, as if the ring began at position 0. From position W - 1 on it hides nothing: a token sees
#            its whole chunk. Calls of one token are right, and so are chunks that end before position W.
#            Known of calls of more than W tokens: https://github.com/Lightning-AI/litgpt/issues/2182 (closed by
#            https://github.com/Lightning-AI/litgpt/pull/2215, which added the error)
# Output     W 4, 2 layers, 12 tokens: error of all logits and of the last token's against those without a cache; change
#            of token 4's logits with token 3, which is in its window, and with token 5, which is in its future
#            no cache: token 4 with token 3 6e-01, with token 5 0e+00
#            chunks of 1: all 6e-07, last 6e-07; token 4 with token 3 6e-01, with token 5 0e+00
#            chunks of 2: all 5e-01, last 5e-01; token 4 with token 3 5e-01, with token 5 6e-01
#            chunks of 3: all 9e-01, last 7e-01; token 4 with token 3 4e-01, with token 5 5e-01
#            chunks of 4: all 8e-01, last 8e-01; token 4 with token 3 0e+00, with token 5 4e-01
#            accepted by speculative decoding of a model that is its own draft, 1 and 3 tokens at a time:
#            without a window 100% and 100%, with it 37% and 11%
# Surprise   The error exists to prevent a silent fault, and who does what it says gets this fault, silently.
#            Speculative decoding lets the target read such chunks, too: it rejects what it would say itself.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 transformers==5.24.0 # with the rest of what litgpt imports
here=$PYTHONPATH
export PIP_NO_DEPS=1 # else pip gets another torch
packages litgpt==0.5.13 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 psutil==7.2.2
"$PYTHON" - <<'END'
import torch
from litgpt import GPT, Config
from litgpt.generate.speculative_decoding import generate

W, N = 4, 12
size = dict(block_size=64, padded_vocab_size=99, n_layer=2, n_head=4, n_embd=64, intermediate_size=64)
size |= dict(bias=False, parallel_residual=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP")


def make(**window):
    torch.manual_seed(0)  # so each model has the same weights
    model = GPT(Config(**size, rotary_percentage=1.0, **window)).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.15)
    return model


def logits(model, ids, chunk):
    if chunk is None:
        return model(ids)[0]
    model.set_kv_cache(batch_size=1)
    calls = zip(ids.split(chunk, dim=1), torch.arange(N).split(chunk))
    result = torch.cat([model(*call)[0] for call in calls])
    model.clear_kv_cache()
    return result


def error(x, expected):
    return float((x - expected).norm() / expected.norm())


def change(model, chunk, token):  # of token 4
    other = ids.clone()
    other[0, token] = (ids[0, token] + 1) % 99
    return error(logits(model, other, chunk)[4], logits(model, ids, chunk)[4])


def accepted(tokens, **window):
    torch.manual_seed(0)
    target, draft = make(**window), make(**window)
    for model in (target, draft):
        model.set_kv_cache(batch_size=1)
    return generate(draft, target, ids[0, :W], 60, temperature=0.0, speculative_k=tokens)[1]


window = dict(sliding_window_size=W, sliding_window_indices=[1, 1])
ids = torch.randint(99, (1, N), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    full, windowed = make(), make(**window)
    for chunk in (None, 1, 2, 3, 4):
        assert error(logits(full, ids, chunk), logits(full, ids, None)) < 1e-5
        x, expected = logits(windowed, ids, chunk), logits(windowed, ids, None)
        all_tokens, last = error(x, expected), error(x[-1], expected[-1])
        past, future = change(windowed, chunk, 3), change(windowed, chunk, 5)
        name = f"chunks of {chunk}: all {all_tokens:.0e}, last {last:.0e};" if chunk else "no cache:"
        print(f"{name} token 4 with token 3 {past:.0e}, with token 5 {future:.0e}")
        if chunk in (None, 1):
            assert max(all_tokens, last) < 1e-5 and past > 0.1 and future < 1e-5
        else:
            assert min(all_tokens, last) > 0.1 and (past < 1e-5) == (chunk == W) and future > 0.1
    try:
        logits(windowed, ids, N)
        raise AssertionError("the whole prompt in one call is served")
    except ValueError as reason:
        assert f"chunked prefill with chunk size <= {W}" in str(reason)
(full_1, full_3), (windowed_1, windowed_3) = ([accepted(n, **w) for n in (1, 3)] for w in ({}, window))
print("accepted by speculative decoding of a model that is its own draft, 1 and 3 tokens at a time:")
print(f"without a window {full_1:.0%} and {full_3:.0%}, with it {windowed_1:.0%} and {windowed_3:.0%}")
assert full_1 == full_3 == 1 and windowed_1 < 0.9 and windowed_3 < 0.5
END
