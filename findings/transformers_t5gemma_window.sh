#!/bin/sh
# T5Gemma's encoder has a window of 2 W + 1 keys with "eager" and of 2 W - 1 keys with FlashAttention.
#
# Versions   transformers 5.24.0, torch 2.11.0; a CPU (FlashAttention isn't run, only asked for its window)
# Behaviour  The mask of a bidirectional sliding_window W lets through W keys on each side. FlashAttention is given
#            window_size=(W - 1, W - 1), which counts the keys beside the own one. Other bidirectional models of the
#            same release (EmbeddingGemma 2, ModernBERT) store W + 1 in the layer to make up for it.
# Output     sliding_window 3, 12 tokens: row 6 sees 7 keys by the mask of "eager", 5 by window_size (2, 2)
# Surprise   attn_implementation is taken for a choice of speed. The difference is two keys of 2 W + 1, at a W of 4096
#            too small for a tolerance.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 transformers==5.24.0
"$PYTHON" - <<'END'
import copy
from collections import defaultdict

import torch
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration, T5GemmaModuleConfig
from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs

W = 3
size = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
size |= dict(num_key_value_heads=2, vocab_size=50, sliding_window=W, layer_types=["sliding_attention"])
module = T5GemmaModuleConfig(**size)
config = T5GemmaConfig(encoder=module, decoder=copy.deepcopy(module), vocab_size=50)
model = T5GemmaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
layer = model.model.encoder.layers[0].self_attn
given = {}
layer.register_forward_pre_hook(lambda _, args, options: given.update(options), with_kwargs=True)
ids = torch.randint(3, 50, (1, 12))
model.model.encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
by_mask = int((given["attention_mask"][0, 0, 6] == 0).sum())
to_flash = _process_flash_attention_kwargs(
    query_length=12,
    key_length=12,
    is_causal=layer.is_causal,
    sliding_window=layer.sliding_window,
    supports_mapping=defaultdict(lambda: True),
)
left, right = to_flash["window_size"]
by_flash = left + 1 + right
print(
    f'sliding_window {W}, 12 tokens: row 6 sees {by_mask} keys by the mask of "eager", '
    f"{by_flash} by window_size {left, right}"
)
assert not to_flash["causal"] and (by_mask, by_flash) == (2 * W + 1, 2 * W - 1)
END
