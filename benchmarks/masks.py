"""--masks: ALiBi, bool masks, biases with and without their gradient, dropout."""

import math
import random
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch._functorch import config as functorch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

import minimal_attn

from .clock import progress
from .measure import FLOP, rate, take_turns, worst
from .peers import compiled_flex_attention, ours, serves
from .sweep import TITLES, in_words, print_line
from .workloads import randn


class Case(NamedTuple):
    name: str
    shape: tuple[int, int, int, int]  # B, H, N, d
    causal: bool = False
    of_bias: tuple[bool, bool] | None = None  # whether it has batches, heads; else they share it
    needs_grad: bool = False  # the bias
    share: float = 1.0  # of the pairs, which are computed


LONG = (1, 16, 8192, 128)
CUDA = [
    Case("ALiBi", LONG),
    Case("bool mask: documents of 1024", LONG, share=1 / 16),
    Case("bool mask: 10 % of 128 x 128", LONG, share=0.1),
    Case("bool mask: 50 % of 128 x 128", LONG, share=0.5),
    Case("bias", LONG, of_bias=(False, True)),
    Case("bias: T5", (8, 12, 2048, 64), of_bias=(False, True), needs_grad=True),
    Case("bias: AlphaFold", (384, 4, 384, 32), of_bias=(False, True), needs_grad=True),
    Case("bool mask: BERT", (8, 12, 512, 64), share=0.75),
    *(Case("dropout 0.1", (1, 2048 // d, 8192, d), causal=True, share=0.5) for d in (64, 128, 256)),
]
CPU = [
    Case("ALiBi", (1, 4, 512, 64)),
    Case("bool mask: documents of 128", (1, 4, 512, 64), share=0.25),
    Case("bool mask: 10 % of 128 x 128", (1, 4, 1024, 64), share=0.1),
    Case("bool mask: 50 % of 128 x 128", (1, 4, 1024, 64), share=0.5),
    Case("bias: T5", (2, 4, 256, 64), of_bias=(False, True), needs_grad=True),
    Case("dropout 0.1", (1, 4, 512, 64), causal=True, share=0.5),
]


def term_of(case: Case, dtype: str, device) -> torch.Tensor | None:
    """A bool mask, or what is added to scores, that broadcasts to (B, H, N, N)."""
    B, H, N, _ = case.shape
    i = torch.arange(N, device=device)
    if case.name == "ALiBi":
        return (-slopes(H, device)[:, None, None] * (i[:, None] - i).abs()).to(getattr(torch, dtype))
    if case.of_bias:
        shared = [n if own else 1 for n, own in zip((B, H), case.of_bias, strict=True)]
        return randn([*shared, N, N], dtype, device)
    if "documents" in case.name:
        size = int(case.name.split()[-1])
        return i[:, None] // size == i // size
    if "%" in case.name:
        tiles = torch.rand(N // 128, N // 128, device=device) < case.share
        tiles |= torch.eye(N // 128, dtype=torch.bool, device=device)  # no row without a key
        return tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)
    if "BERT" in case.name:  # padding on the right
        lengths = torch.tensor([random.randint(N // 2, N) for _ in range(B)], device=device)
        return (i < lengths[:, None])[:, None, None].expand(B, 1, N, N)
    return None


def slopes(H: int, device) -> torch.Tensor:
    return 2.0 ** (-8.0 * torch.arange(1, H + 1, device=device) / H)


def by_flex(case: Case, term) -> partial:
    """FlexAttention. Its block mask is ready."""
    B, H, N, _ = case.shape
    if case.name == "ALiBi":
        of_head = slopes(H, term.device)
        return partial(flexible, None, lambda s, b, h, i, j: s - of_head[h] * (i - j).abs())
    if term.dtype != torch.bool:
        return partial(flexible, None, None)
    whole = term.expand(B, 1, N, N)
    mask = flex.create_block_mask(
        lambda b, h, i, j: whole[b, 0, i, j], B if term.dim() == 4 else None, None, N, N, device=term.device
    )
    return partial(flexible, mask, None)


functorch.donated_buffer = False  # so that FlexAttention's backward pass may be called again


def flexible(block_mask, score_mod, q, k, v, bias=None):
    if bias is not None:
        shared = [n == 1 for n in bias.shape[:2]]

        def score_mod(s, b, h, i, j):
            return s + bias[0 if shared[0] else b, 0 if shared[1] else h, i, j]

    return compiled_flex_attention()(q, k, v, score_mod, block_mask)


def by_sdpa(case: Case, kernel, term, q, k, v, bias=None):
    mask = term if bias is None else bias
    p = 0.1 if "dropout" in case.name else 0.0
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=case.causal)


def by_us(case: Case, backend, term, q, k, v, bias=None):
    options = dict(causal=case.causal, backend=backend)
    if case.name == "ALiBi":
        options["alibi_slopes"] = slopes(case.shape[1], q.device)
    elif bias is not None:
        options["bias"] = bias
    elif term is not None:
        options["attn_mask"] = term
    return minimal_attn.forward(q, k, v, dropout_p=0.1 if "dropout" in case.name else 0.0, **options)


def peers_for(case: Case, term, args, dtype: str) -> dict:
    """Functions of q, k, v and a bias, and their contexts, by name."""
    of_sdpa = {"SDPA": None}
    if args.device == "cuda":
        of_sdpa = {"SDPA efficient": SDPBackend.EFFICIENT_ATTENTION}
        if dtype != "float32":
            of_sdpa["SDPA cuDNN"] = SDPBackend.CUDNN_ATTENTION
        if "dropout" in case.name and dtype != "float32":
            of_sdpa["SDPA flash"] = SDPBackend.FLASH_ATTENTION
    peers = {name: partial(by_sdpa, case, kernel, term) for name, kernel in of_sdpa.items()}
    if args.device == "cuda" and "dropout" not in case.name:
        peers["FlexAttention"] = by_flex(case, term)
    for name in args.backend:
        if serves(name, args.device, dtype):
            peers[ours(name)] = partial(by_us, case, name, term)
    return {name: (function, nullcontext) for name, function in peers.items()}


def judge(case: Case, term, q, k, v, do):
    """As measure.judge: o's error, or that of dq, dk and dv, in one head. Dropout's is not known: 0."""
    B, H, N, d = case.shape
    b, h = random.randrange(B), random.randrange(H)
    if "dropout" in case.name:
        return lambda results: 0.0
    inputs = [x.detach()[b, h].double().requires_grad_(do is not None) for x in (q, k, v)]
    s = inputs[0] @ inputs[1].T / math.sqrt(d)
    of_head = term.expand(B, H, N, N)[b, h]
    s = s.masked_fill(~of_head, -math.inf) if of_head.dtype == torch.bool else s + of_head.double()
    o = s.softmax(-1) @ inputs[2]
    truth = [o] if do is None else torch.autograd.grad(o, inputs, do[b, h].double())

    def error_of(results) -> float:
        pairs = [(x[b, h].double(), y) for x, y in zip(results, truth, strict=False)]
        return worst([((x - y).norm() / y.norm()).item() for x, y in pairs])

    return error_of


def measure(case: Case, args, dtype: str) -> list[dict]:
    """A record for each peer."""
    B, H, N, d = case.shape
    q, k, v = (randn(case.shape, dtype, args.device) for _ in range(3))
    do = None if args.part == "forward" else randn(q.shape, dtype, args.device)
    term = term_of(case, dtype, args.device)
    error_of = judge(case, term, q, k, v, do)
    inputs = [x.requires_grad_(do is not None) for x in (q, k, v)]
    if case.of_bias:
        inputs.append(term.requires_grad_(case.needs_grad and do is not None))
    found, times = take_turns(peers_for(case, term, args, dtype), [*inputs, do], error_of, args, case.name)
    rate(found, times, FLOP[args.part] * case.share * B * H * N**2 * d, 2 * k.numel() * k.element_size())
    return [{"peer": name, "mask": case.name} | r for name, r in found.items()]


def run_masks(args, about: dict) -> int:
    dtypes, wrong, failures = args.dtype or ["bfloat16" if args.device == "cuda" else "float32"], False, {}
    for dtype in dtypes:
        print(f"\n{dtype}{TITLES[args.part]}: ms / TFLOP/s of what is visible / error (/ ratio)\n")
        for case in CUDA if args.device == "cuda" else CPU:
            line = measure(case, args, dtype)
            progress()
            print_line(f"{case.name}, {case.shape}", [f"{r['peer']}: {in_words(r)}" for r in line])
            wrong |= any(r.get("ratio") == 0 for r in line)
            failures |= {f"- {r['peer']}, {case.name}: {r['failed']}": 1 for r in line if "failed" in r}
            torch.cuda.empty_cache()  # does nothing without a GPU
    print("\n" + "\n".join(failures) if failures else "")
    return int(wrong)
