"""--packed: documents in one batch, causal, by cu_seqlens."""

import math
import random
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.nn import functional as F

import minimal_attn

from .clock import progress
from .measure import FLOP, exact, rate, take_turns, worst
from .peers import ours, serves
from .sweep import TITLES, in_words, print_line
from .workloads import randn


class Packed(NamedTuple):
    lengths: str  # how they are drawn, and how many tokens there are in all
    total: int
    H: int
    Hkv: int
    d: int


CUDA = [
    Packed("documents of 1024", 8192, 16, 16, 128),
    Packed("documents of 1024", 32768, 16, 16, 128),
    *(
        Packed("16 to 8192", 32768, *heads)
        for heads in ((16, 16, 128), (32, 32, 64), (32, 8, 128), (8, 8, 256))
    ),
    Packed("8 to 128", 32768, 16, 16, 128),
]
CPU = [Packed("documents of 1024", 4096, 4, 4, 64), Packed("8 to 128", 2048, 4, 2, 64)]


def lengths_of(case: Packed) -> list[int]:
    """All alike, or log-uniform between two numbers; the last document is what is left."""
    low, *high = map(int, case.lengths.removeprefix("documents of ").split(" to "))
    lengths = []
    while left := case.total - sum(lengths):
        drawn = math.exp(random.uniform(math.log(low), math.log(high[0]))) if high else low
        lengths.append(min(int(drawn), left))
    return lengths


def one_by_one(bounds, q, k, v):
    """SDPA for each document, where there is nothing better."""
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=q.size(1) != k.size(1))
    return torch.cat([sdpa(*(x[:, :, i:j] for x in (q, k, v))) for i, j in bounds], dim=2)


def varlen(function, q, k, v):
    """A function of (tokens, H, d) tensors on (1, H, tokens, d) ones."""
    out = function(*(x[0].transpose(0, 1) for x in (q, k, v)))
    return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]


def peers_for(args, dtype: str, bounds: list[tuple[int, int]]) -> dict:
    """Functions of q, k and v (1, H, tokens, d), and their contexts, by name."""
    cu = torch.tensor([0] + [j for _, j in bounds], dtype=torch.int32, device=args.device)
    longest = max(j - i for i, j in bounds)
    peers = {}
    if args.device == "cpu" or dtype == "float32":
        peers["SDPA, one by one"] = partial(one_by_one, bounds)
    else:
        if find_spec("torch.nn.attention.varlen"):
            from torch.nn.attention.varlen import varlen_attn

            def flash_attention_2(q, k, v):
                return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))

            peers["torch varlen"] = partial(varlen, flash_attention_2)
        if dtype == "bfloat16" and args.part == "forward" and find_spec("fa3_fwd_interface"):
            from fa3_fwd_interface import flash_attn_varlen_func as flash_attention_3

            call = partial(flash_attention_3, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
            call = partial(call, max_seqlen_q=longest, max_seqlen_k=longest)
            peers["FlashAttention-3"] = partial(varlen, call)
        if find_spec("flash_attn") and find_spec("flash_attn.cute"):
            from flash_attn.cute import flash_attn_varlen_func as flash_attention_4

            call = partial(flash_attention_4, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
            peers["FlashAttention-4"] = partial(varlen, call)
    for name in args.backend:
        if serves(name, args.device, dtype):
            peers[ours(name)] = partial(
                minimal_attn.forward, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, backend=name
            )
    return {name: (function, nullcontext) for name, function in peers.items()}


def judge(case: Packed, bounds, q, k, v, do):
    """As measure.judge: the error of some documents, of a head each."""
    chosen = [(random.randrange(case.H), *random.choice(bounds)) for _ in range(3)]
    group = case.H // case.Hkv
    truth = []
    for h, i, j in chosen:
        tensors = q[0, h, i:j], k[0, h // group, i:j], v[0, h // group, i:j]
        truth.append(exact(*tensors, None if do is None else do[0, h, i:j], True))

    def error_of(results) -> float:
        found = [results[0][0, h, i:j].double() for h, i, j in chosen]
        pairs = [(x, y[0]) for x, y in zip(found, truth, strict=True)]
        return worst([((x - y).norm() / y.norm()).item() for x, y in pairs if y.any()])

    return error_of


def measure(case: Packed, args, dtype: str) -> list[dict]:
    """A record for each peer. Of the gradients the error is dq's."""
    lengths = lengths_of(case)
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    bounds = [(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    q, k, v = (
        randn((1, heads, case.total, case.d), dtype, args.device) for heads in (case.H, case.Hkv, case.Hkv)
    )
    do = None if args.part == "forward" else randn(q.shape, dtype, args.device)
    error_of = judge(case, bounds, q, k, v, do)
    inputs = [x.requires_grad_(do is not None) for x in (q, k, v)]
    peers = peers_for(args, dtype, bounds)
    found, times = take_turns(peers, [*inputs, do], error_of, args, case.lengths)
    flop = FLOP[args.part] * case.H * case.d * sum(n * n for n in lengths) / 2
    rate(found, times, flop, 2 * k.numel() * k.element_size())
    return [{"peer": name, "mask": "causal", "documents": len(lengths)} | found[name] for name in peers]


def run_packed(args, about: dict) -> int:
    dtypes, wrong, failures = args.dtype or ["bfloat16" if args.device == "cuda" else "float32"], False, {}
    for dtype in dtypes:
        print(f"\n{dtype}{TITLES[args.part]}: ms / TFLOP/s of what is seen / error (/ ratio)\n")
        for n, case in enumerate(CUDA if args.device == "cuda" else CPU):
            line = measure(case, args, dtype)
            progress()
            if n == 0:
                print_line("tokens, lengths, heads, d", [r["peer"] for r in line])
                print_line("---", ["---"] * len(line))
            print_line(f"{case.total}, {case.lengths}, {case.H}/{case.Hkv}, {case.d}", map(in_words, line))
            wrong |= any(r.get("ratio") == 0 for r in line)
            failures |= {f"- {r['peer']}, {dtype}: {r['failed']}": 1 for r in line if "failed" in r}
            torch.cuda.empty_cache()  # does nothing without a GPU
    print("\n" + "\n".join(failures) if failures else "")
    return int(wrong)
