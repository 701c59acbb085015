"""Trains a small GPT once with each attention: the same weights, the same batches, and so the same losses.

    python examples/train.py                              on a CPU: float32, half a minute
    python examples/train.py --compile --plot train.svg   on a GPU: bfloat16; by torch.compile
    python examples/train.py --attention flash cudnn efficient minimal_attn --context 4096 --batch 4
    python examples/train.py --packed --attention minimal_attn     documents, padded and packed

With minimal_attn installed; after `make build` alone: PYTHONPATH=. build/python examples/train.py

The text is Python's standard library as it is installed. The runs take turns, ten steps at a time, so that
their times compare. The losses are equal but for rounding. Training amplifies rounding with every
attention, so the bound is checked only for the first 100 steps.

With --packed a sequence is a document of 1 to `context` characters, and one more run has the same documents
without padding: all in one row, kept apart by cu_seqlens.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal_attn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
VOCABULARY = 128  # ASCII
TURN = 10  # steps of a turn
# How far losses of about 2.5 may be apart. float32 rounds them to 2.4e-7, and two such roundings were seen.
BOUND, BOUND_STEPS = (0.05 if ON_GPU else 1e-5), 100
PACKED_BOUND = 10 * BOUND  # all layers sum without padding, in another order: 1.1e-5 was seen


def manual(q, k, v):
    """S and its softmax are N x N tensors. Autograd keeps the second for the backward pass."""
    S = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(S.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return S.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v


sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
# The function, and which of PyTorch's kernels it may take: with None PyTorch chooses.
ATTENTION = {
    "manual": (manual, None),
    "sdpa": (sdpa, None),
    "flash": (sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": (sdpa, SDPBackend.CUDNN_ATTENTION),
    "efficient": (sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "minimal_attn": (partial(minimal_attn.forward, causal=True), None),
    "packed": (partial(minimal_attn.forward, causal=True), None),
}


class Batch(NamedTuple):
    """What a step trains on."""

    tokens: torch.Tensor  # (B, N); packed (1, total)
    targets: torch.Tensor  # the characters behind them; -100 where a row is padded
    positions: torch.Tensor | None  # in their documents; None: in their rows
    options: dict  # of the attention


def batch_of(text, lengths, is_packed):
    """Of text (B, context + 1), the first lengths (B,) characters of each row, or all with None."""
    tokens, targets = text[:, :-1], text[:, 1:]
    if lengths is None:
        return Batch(tokens, targets, None, {})
    position = torch.arange(tokens.shape[1], device=text.device).expand_as(tokens)
    inside = position < lengths[:, None]
    if not is_packed:
        return Batch(tokens, targets.masked_fill(~inside, -100), None, {})
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    rows = (x[inside][None] for x in (tokens, targets, position))
    return Batch(*rows, dict(cu_seqlens_q=ends, cu_seqlens_k=ends))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x, attention, options):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, H, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, N, d), nothing is copied
        o = ATTENTION[attention][0](q, k, v, **options)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, batch, attention):
        """The mean loss of all predictions of a next character."""
        at = self.position.weight if batch.positions is None else self.position(batch.positions)
        x = self.token(batch.tokens) + at
        for block in self.blocks:
            x = block(x, attention, batch.options)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), batch.targets.flatten())


class Run:
    """A copy of the model, which trains with one attention."""

    def __init__(self, attention, model, args):
        self.attention, self.model, self.losses, self.ms = attention, copy.deepcopy(model), [], []
        self.loss = torch.compile(self.model) if args.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=True)

    def take_turn(self, batches):
        kernel = ATTENTION[self.attention][1]
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        with sdpa_kernel(kernel) if kernel else nullcontext():
            for text, lengths in batches:
                batch = batch_of(text, lengths, self.attention == "packed")
                with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
                    loss = self.loss(batch, self.attention)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.detach())
        loss.item()  # waits for the GPU
        self.ms.append((time.perf_counter() - begin) * 1e3 / TURN)
        if ON_GPU:
            self.megabytes = (torch.cuda.max_memory_allocated() - before) / 1e6


def train(args):
    torch.manual_seed(args.seed)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    text = text.long().clamp(max=VOCABULARY - 1)
    model = GPT(args.layers, args.width, args.width // args.head_dim, args.context).to(DEVICE)
    runs = [Run(attention, model, args) for attention in args.attention + ["packed"] * args.packed]
    for turn in range(args.steps // TURN):
        begins = torch.randint(len(text) - args.context, (TURN, args.batch, 1))
        texts = text[begins + torch.arange(args.context + 1)].to(DEVICE)
        lengths = [None] * TURN
        if args.packed:
            lengths = torch.randint(1, args.context + 1, (TURN, args.batch)).to(DEVICE)
        batches = list(zip(texts, lengths, strict=True))
        for i in range(len(runs)):  # each turn begins with another run
            runs[(turn + i) % len(runs)].take_turn(batches)
    return runs


def report(runs, losses):
    """Prints the mean losses of eight parts of the training, and a line for each run."""
    print("steps    ", *(f"{run.attention:>12}" for run in runs))
    for part in torch.arange(losses.shape[1]).chunk(8):
        print(f"{part[0]:4}-{part[-1]:<4}", *(f"{loss:12.5f}" for loss in losses[:, part].mean(1)))
    apart = (losses - losses[0])[:, :BOUND_STEPS].abs().amax(1).tolist()
    for run, difference in zip(runs, apart, strict=True):
        ms = statistics.median(run.ms[1:] or run.ms)  # the first turn compiles
        memory = f", {run.megabytes:.0f} MB beside weights and optimizer" if ON_GPU else ""
        print(f"{run.attention:12} {ms:7.2f} ms a step{memory}; losses differ by at most {difference:.1e}")
    for run, difference in zip(runs, apart, strict=True):
        bound = PACKED_BOUND if run.attention == "packed" else BOUND
        if difference >= bound:
            sys.exit(f"The first {BOUND_STEPS} losses of {run.attention} are not equal within {bound}.")


def plot(runs, losses, path):
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    turns, steps = losses.unflatten(1, (-1, TURN)), range(0, losses.shape[1], TURN)
    for run, turn, differences in zip(runs, turns, (turns - turns[0]).abs(), strict=True):
        left.plot(steps, turn.mean(1), label=run.attention)
        right.semilogy(steps, differences.amax(1), nonpositive="mask")
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel=f"difference from {runs[0].attention}")
    left.legend()
    figure.savefig(path)


def main(arguments=None):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add, three = parser.add_argument, ["manual", "sdpa", "minimal_attn"]
    choices = [name for name in ATTENTION if name != "packed"]
    add("--attention", nargs="+", default=three, choices=choices, help="flash, cudnn, efficient: SDPA's")
    add("--packed", action="store_true", help="documents of random lengths, also in one row")
    add("--compile", action="store_true", help="the model, by torch.compile")
    add("--plot", metavar="FILE", help="draw the losses there (needs matplotlib)")
    add("--steps", type=int, default=200 if ON_GPU else 400, help="a multiple of 10")
    add("--batch", type=int, default=16 if ON_GPU else 4, help="sequences of a step")
    add("--context", type=int, default=1024 if ON_GPU else 256, help="characters of a sequence")
    add("--layers", type=int, default=6 if ON_GPU else 2)
    add("--width", type=int, default=1024 if ON_GPU else 128, help="of a token's vector")
    add("--head-dim", type=int, default=64, help="d")
    add("--lr", type=float, default=3e-4 if ON_GPU else 1e-3, help="of AdamW")
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    runs = train(args)
    losses = torch.stack([torch.stack(run.losses) for run in runs]).cpu()
    if args.plot:
        plot(runs, losses, args.plot)
    report(runs, losses)


if __name__ == "__main__":
    main()
