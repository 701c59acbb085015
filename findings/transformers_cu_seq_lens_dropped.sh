#!/bin/sh
# StableLM and Nemotron in transformers take a packed batch's cu_seq_lens and don't give them to their attention layers.
#
# Versions   transformers 5.24.0, torch 2.11.0, a CPU
# Behaviour  DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes cu_seq_lens_q and the like. The models' forward
#            takes any keyword and hands it to its decoder layers, which take it, too, and call self_attn without it.
#            An attention function registered by AttentionInterface sees None. Other decoders pass them on.
# Output     cu_seq_lens_q that reach the attention function: llama [0, 3, 8], stablelm None, nemotron None
# Surprise   The same batch and the same attention function keep documents apart in a hundred architectures and mix
#            them in two, without an error or a warning: the keyword is accepted three calls deep.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 transformers==5.24.0
"$PYTHON" - <<'END'
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

transformers.logging.set_verbosity_error()
got = []


def attention(module, *tensors, **options):
    got.append(options.get("cu_seq_lens_q"))
    return sdpa_attention_forward(module, *tensors, **options)


transformers.AttentionInterface.register("recorded", attention)
transformers.AttentionMaskInterface.register("recorded", transformers.masking_utils.sdpa_mask)
collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11, 12]}])
size = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
reached = {}
for name in ("llama", "stablelm", "nemotron"):
    config = transformers.AutoConfig.for_model(name, **size, num_key_value_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="recorded").eval()
    got.clear()
    with torch.no_grad():
        model(**{key: x for key, x in batch.items() if key != "labels"})
    [cu] = got
    reached[name] = None if cu is None else cu.tolist()
words = ", ".join(f"{name} {cu}" for name, cu in reached.items())
print(f"cu_seq_lens_q that reach the attention function: {words}")
assert reached == {"llama": [0, 3, 8], "stablelm": None, "nemotron": None}
END
