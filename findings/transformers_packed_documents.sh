#!/bin/sh
# transformers keeps packed documents apart by position_ids only with use_cache=False, and in gpt-oss never.
#
# Versions   transformers 5.24.0, torch 2.11.0, a CPU, attn_implementation "eager" ("sdpa" the same, where it exists)
# Behaviour  A batch of two documents in one row, with position_ids 0 1 2 0 1 2 and no mask, gets a block mask if the
#            model makes no cache. use_cache is True by default, so a plain model(input_ids, position_ids) mixes them;
#            an attention_mask of ones does, too. gpt-oss's model doesn't hand position_ids to the mask at all.
# Output     relative error of the logits against each document alone
#            llama: as called 3.3e-01, use_cache=False 1.0e-07, and a mask of ones 3.3e-01
#            gpt_oss: as called 2.8e-01, use_cache=False 2.8e-01, and a mask of ones 2.8e-01
# Surprise   A switch of speed decides which tokens are seen. Trainer sets use_cache=False, so llama is right there, and
#            the same batch in a training loop of one's own is not. No error is raised.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 transformers==5.24.0
"$PYTHON" - <<'END'
import torch
import transformers

transformers.logging.set_verbosity_error()
size = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
size |= dict(num_key_value_heads=2, vocab_size=50, max_position_embeddings=64)
experts = dict(num_local_experts=2, num_experts_per_tok=1, sliding_window=16)
configs = {
    "llama": transformers.LlamaConfig(**size),
    "gpt_oss": transformers.GptOssConfig(**size, **experts),
}
for name, config in configs.items():
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    documents = torch.randint(0, 50, (1, 6)), torch.randint(0, 50, (1, 5))
    packed = dict(input_ids=torch.cat(documents, 1), position_ids=torch.tensor([[*range(6), *range(5)]]))
    ones = torch.ones(1, 11, dtype=torch.int64)
    with torch.no_grad():
        alone = torch.cat([model(document).logits for document in documents], 1)
        calls = {}, dict(use_cache=False), dict(use_cache=False, attention_mask=ones)
        errors = [float((model(**packed, **call).logits - alone).norm() / alone.norm()) for call in calls]
    texts = [f"{error:.1e}" for error in errors]
    print(f"{name}: as called {texts[0]}, use_cache=False {texts[1]}, and a mask of ones {texts[2]}")
    assert errors[0] > 0.02 and errors[2] > 0.02
    assert errors[1] < 1e-5 if name == "llama" else errors[1] > 0.02
END
