"""A Llama of transformers generates with minimal_attn: a ragged batch, padded on the left, with a cache.

The model is small and random, so nothing is downloaded. Needs transformers:

    python examples/generate.py [--static]    with a cache of fixed size (on a GPU its steps are compiled)

With minimal_attn installed; after `make build` alone: PYTHONPATH=. build/python examples/generate.py
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

import minimal_attn.huggingface

PROMPTS, NEW = (700, 512, 300, 40), 64  # tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--static", action="store_true", help="a StaticCache")
    static = parser.parse_args().static
    logging.set_verbosity_error()
    minimal_attn.huggingface.register()
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config).eval().to(device)

    longest = max(PROMPTS)
    padding = longest - torch.tensor(PROMPTS, device=device)
    mask = (torch.arange(longest, device=device) >= padding[:, None]).long()
    ids = torch.randint(3, config.vocab_size, mask.shape, device=device) * mask
    options = dict(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    options |= dict(eos_token_id=None, cache_implementation="static" if static else None)

    names = "eager", "sdpa", "minimal_attn"
    tokens, seconds = {}, dict.fromkeys(names, float("inf"))
    for _ in range(3):  # they take turns; the best of each
        for name in names:
            model.set_attn_implementation(name)
            begin = time.perf_counter()
            tokens[name] = model.generate(**options)[:, longest:].cpu()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    for name in names:
        same, total = int((tokens[name] == tokens["eager"]).sum()), tokens[name].numel()
        print(f"{name:12}  {total / seconds[name]:6.0f} tokens/s, {same} of {total} tokens are eager's")
    print("calls of attention layers:", dict(minimal_attn.huggingface.calls))


if __name__ == "__main__":
    main()
