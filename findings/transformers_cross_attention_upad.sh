#!/bin/sh
# BART and its kin with FlashAttention: padding of the encoder's input takes decoder tokens their cross attention.
#
# Versions   transformers 5.24.0, torch 2.11.0, a CPU. The package flash_attn needs a GPU. SDPA stands in for its two
#            attention functions, transformers' copies of its unpad_input and pad_input for the originals.
# Behaviour  BART, Marian, Pegasus and M2M-100 give the encoder's padding mask to _upad_input. It takes this for the
#            mask of the queries, too (the last columns, if the decoder has fewer tokens). Decoder tokens where it is 0
#            are left out, and their cross attention is 0. If the decoder has more tokens than the encoder, queries are
#            counted in rows of the encoder's length: the last ones of a text attend to the next text's keys. A call of
#            one decoder token, as in generate, is right.
#            Known: https://github.com/huggingface/transformers/issues/35032 (closed)
# Output     text A of 10 tokens, text B of 5 and 5 of padding: error of the logits against eager for 1, 8 and 12
#            decoder tokens, and how those of A at 12 change if B is another text
#            bart: A 4e-07 B 2e-07, A 3e-07 B 5e-01, A 2e-01 B 5e-01; A beside another B 3e-01
#            marian: A 2e-07 B 2e-07, A 2e-07 B 6e-01, A 4e-02 B 7e-01; A beside another B 4e-02
#            pegasus: A 2e-07 B 2e-07, A 2e-07 B 7e-01, A 1e-01 B 7e-01; A beside another B 1e-01
#            m2m_100: A 1e-07 B 1e-07, A 2e-07 B 4e-01, A 2e-01 B 4e-01; A beside another B 3e-01
#            decoder tokens of B with cross attention: 1 of 1, 3 of 8, 3 of 12; with eager all
# Surprise   The answer in the issue names BART as the model to look at, and BART has it. The loss of a padded batch is
#            wrong, generate is right. A text without padding can depend on its neighbour. No error is raised.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 transformers==5.24.0
"$PYTHON" - <<'END'
import torch
import transformers
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

transformers.logging.set_verbosity_error()


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    pairs = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = pairs.tril(k.shape[2] - q.shape[2]) if causal else pairs
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale).transpose(1, 2)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    ends = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
    parts = zip(*(x[None].split(cu.diff().tolist(), dim=1) for x, cu in zip((q, k, v), ends)))
    return torch.cat([flash_attn_func(*part, **options)[0] for part in parts])


functions = flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input
utils._lazy_imports = lambda *_, **__: functions
transformers.AttentionInterface.register("recorded", flash_attention_forward)
transformers.AttentionMaskInterface.register("recorded", flash_attention_mask)
size = dict(vocab_size=60, d_model=32, max_position_embeddings=64, init_std=0.2)
for part in ("encoder", "decoder"):
    size |= {f"{part}_layers": 1, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 32}
size |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)
torch.manual_seed(0)
mask = torch.tensor([[1] * 10, [1] * 5 + [0] * 5])
texts = torch.randint(3, 60, (2, 10)) * mask
other = torch.stack([texts[0], (texts[1] + 1) * mask[1]])  # another text B


def error(x, expected):
    return float((x - expected).norm() / expected.norm())


rows = []  # of the decoder tokens, how many of A and of B get cross attention in each call


def logits(model, implementation, texts, target):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(texts, attention_mask=mask, decoder_input_ids=target).logits


for name in ("bart", "marian", "pegasus", "m2m_100"):
    config = transformers.AutoConfig.for_model(name, **size)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    cross = model.model.decoder.layers[0].encoder_attn.out_proj
    cross.register_forward_pre_hook(lambda _, args: rows.append(args[0].any(-1).sum(1).tolist()))
    errors, words = [], []
    for n in (1, 8, 12):
        target = torch.randint(3, 60, (2, n))
        rows.clear()
        flash, flash_other = (logits(model, "recorded", x, target) for x in (texts, other))
        eager, eager_other = (logits(model, "eager", x, target) for x in (texts, other))
        a, b = map(error, flash, eager)
        leak = error(flash_other[0], flash[0])
        errors.append((a, b, leak))
        words.append(f"A {a:.0e} B {b:.0e}")
        assert rows == [[n, {1: 1, 8: 3, 12: 3}[n]]] * 2 + [[n, n]] * 2
        assert torch.equal(eager_other[0], eager[0])
    (a1, b1, leak1), (a8, b8, leak8), (a12, b12, leak12) = errors
    print(f"{name}: {', '.join(words)}; A beside another B {leak12:.0e}")
    assert max(a1, b1, a8) < 1e-5 and min(b8, a12, b12) > 0.02
    assert leak1 == leak8 == 0 and leak12 > 0.02
print("decoder tokens of B with cross attention: 1 of 1, 3 of 8, 3 of 12; with eager all")
END
