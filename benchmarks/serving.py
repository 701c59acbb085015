"""--serving: packed queries over caches of keys, contiguous or in pages, causal, by cu_seqlens."""

import random
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch

import minimal_attn

from .clock import progress
from .measure import exact, rate, take_turns, worst
from .packed import varlen
from .peers import ours, serves
from .sweep import in_words, print_line
from .workloads import randn


class Serving(NamedTuple):
    name: str
    queries: list[int]  # of each sequence
    keys: list[int]
    window: int = -1
    Hq: int = 32
    Hkv: int = 8
    d: int = 128


RAGGED = [64 << n % 10 for n in range(64)]
CUDA = [
    Serving("64 x 1 over 4096", [1] * 64, [4096] * 64),
    Serving("64 x 1 over 64 to 32768", [1] * 64, RAGGED),
    Serving("64 x 1 over 32768, window 128", [1] * 64, [32768] * 64, 127),
    Serving("60 x 1 over 4096, 4 x 2048", [1] * 60 + [2048] * 4, [4096] * 60 + [2048] * 4),
    Serving("16 x 2048 over 2048", [2048] * 16, [2048] * 16),
]
CPU = [
    Serving("8 x 1 over 1024", [1] * 8, [1024] * 8, -1, 8, 2, 64),
    Serving("7 x 1 over 1024, 64", [1] * 7 + [64], [1024] * 7 + [64], -1, 8, 2, 64),
]
PAGE_SIZES = 0, 16, 256  # 0: contiguous


def bounds_of(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


def pages_of(x, lengths: list[int], page_size: int, table):
    """x (1, H, total, d) in pages (pages, page_size, H, d)."""
    pages = x.new_zeros(int(table.max()) + 1, page_size, x.shape[1], x.shape[3])
    for row, keys in zip(table, x[0].transpose(0, 1).split(lengths), strict=True):
        n = -(-len(keys) // page_size)
        pages.view(-1, *pages.shape[2:])[
            (row[:n, None] * page_size + torch.arange(page_size, device=x.device)).flatten()[: len(keys)]
        ] = keys
    return pages


def peers_for(case: Serving, args, dtype: str, k, v, page_size: int) -> dict:
    """Functions of q, k and v (1, H, tokens, d), and their contexts, by name. Pages have the same k and v."""
    cu_q, cu_k = (bounds_of(n, args.device) for n in (case.queries, case.keys))
    longest = dict(max_seqlen_q=max(case.queries), max_seqlen_k=max(case.keys))
    options = dict(causal=True, window_size=(case.window, 0 if case.window >= 0 else -1))
    peers = {}
    has_fa3 = dtype == "bfloat16" and args.device == "cuda" and find_spec("fa3_fwd_interface")
    if has_fa3 and page_size == 0 and case.window < 0:
        from fa3_fwd_interface import flash_attn_varlen_func as flash_attention_3

        call = partial(flash_attention_3, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, **longest)
        peers["FlashAttention-3"] = partial(varlen, call)
    for name in args.backend:
        if not serves(name, args.device, dtype):
            continue
        call = partial(minimal_attn.forward, cu_seqlens_q=cu_q, backend=name, **options)
        if page_size:
            counts = torch.tensor([-(-n // page_size) for n in case.keys])
            numbers = torch.randperm(int(counts.sum()), device=args.device).int().split(counts.tolist())
            table = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True)
            pages = [pages_of(x, case.keys, page_size, table).transpose(1, 2) for x in (k, v)]
            room = table.shape[1] * page_size
            begins = torch.arange(len(table) + 1, device=args.device, dtype=torch.int32) * room
            call = partial(call, cu_seqlens_k=begins, seqused_k=cu_k.diff(), block_table=table.view(1, -1))
            peers[ours(name)] = lambda q, k, v, call=call, pages=pages: call(q, *pages)
        else:
            peers[ours(name)] = partial(call, cu_seqlens_k=cu_k)
    return {name: (function, nullcontext) for name, function in peers.items()}


def judge(case: Serving, q, k, v):
    """As measure.judge: the error of three sequences, of a head each."""
    truth = []
    for _ in range(3):
        n, h = random.randrange(len(case.queries)), random.randrange(case.Hq)
        i, j = sum(case.queries[:n]), sum(case.keys[:n])
        queries, keys, head = case.queries[n], case.keys[n], h * case.Hkv // case.Hq
        first = max(0, keys - 1 - case.window) if case.window >= 0 else 0  # such cases have one query each
        rows = slice(j + first, j + keys)
        o = exact(q[0, h, i : i + queries], k[0, head, rows], v[0, head, rows], None, queries == keys)[0]
        truth.append((h, slice(i, i + queries), o))

    def error_of(results) -> float:
        pairs = [(results[0][0, h, rows].double(), o) for h, rows, o in truth]
        return worst([((x - y).norm() / y.norm()).item() for x, y in pairs])

    return error_of


def run_serving(args, about: dict) -> int:
    dtypes, wrong, failures = args.dtype or ["bfloat16" if args.device == "cuda" else "float32"], False, {}
    for dtype in dtypes:
        print(f"\n{dtype}: ms / GB/s of the keys that are seen / error (/ ratio)\n")
        for case in CUDA if args.device == "cuda" else CPU:
            heads = zip((case.Hq, case.Hkv, case.Hkv), (case.queries, case.keys, case.keys), strict=True)
            q, k, v = (randn((1, H, sum(n), case.d), dtype, args.device) for H, n in heads)
            seen = sum(min(n, case.window + 1) if case.window >= 0 else n for n in case.keys)
            for page_size in PAGE_SIZES:
                peers = peers_for(case, args, dtype, k, v, page_size)
                found, times = take_turns(peers, (q, k, v, None), judge(case, q, k, v), args, case.name)
                rate(found, times, 0, 2 * seen * case.Hkv * case.d * q.element_size())
                line = [{"peer": name, "mask": "decode"} | found[name] for name in peers]
                progress()
                words = [f"{r['peer']}: {in_words(r)}" for r in line]
                print_line(f"{case.name}, {f'pages of {page_size}' if page_size else 'contiguous'}", words)
                wrong |= any(r.get("ratio") == 0 for r in line)
                failures |= {f"- {r['peer']}, {dtype}: {r['failed']}": 1 for r in line if "failed" in r}
                torch.cuda.empty_cache()  # does nothing without a GPU
    print("\n" + "\n".join(failures) if failures else "")
    return int(wrong)
