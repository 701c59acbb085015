"""What is compared: manual attention, PyTorch's, FlashAttention-3 and the backends of minimal_attn."""

import math
import os
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from importlib.util import find_spec

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

import minimal_attn


@lru_cache(maxsize=1)
def hidden(N: int, device) -> torch.Tensor:
    return torch.ones(N, N, dtype=torch.bool, device=device).triu(1)


def manual(q, k, v, causal=False, softcap=None):
    size = 3 * math.prod(q.shape[:3]) * k.size(2) * q.element_size()
    # On a full GPU PyTorch raises an error; on the CPU the system would kill the process.
    if q.device.type == "cpu" and size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
        raise MemoryError("its N x N matrices would take over half of the memory")
    rows = q.unflatten(1, (k.size(1), -1)).flatten(2, 3)  # of all query heads that share a key head
    att = rows @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
    if softcap:
        att = softcap * torch.tanh(att / softcap)
    if causal:
        att = att.masked_fill(hidden(q.size(2), q.device), -math.inf)
    return (F.softmax(att, dim=-1) @ v).view(q.shape)


def sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.size(1) != k.size(1))


def flash_attention_3(q, k, v, causal, softcap=0.0):
    from fa3_fwd_interface import flash_attn_func  # takes (B, N, H, d); transpose copies nothing

    heads_last = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(*heads_last, causal=causal, softcap=softcap).transpose(1, 2)


@lru_cache(maxsize=1)
def block_mask(N: int, device):
    return flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device=device)


def flex_attention(q, k, v, causal, softcap):
    mask = block_mask(q.size(2), q.device) if causal else None
    return compiled_flex_attention()(
        q, k, v, lambda s, *_: softcap * torch.tanh(s / softcap), mask, enable_gqa=q.size(1) != k.size(1)
    )


@lru_cache(maxsize=1)
def compiled_flex_attention():
    return torch.compile(flex.flex_attention)


@contextmanager
def tf32():
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def cpu_instructions(name: str):
    before = minimal_attn._C.limit_cpu_instructions(name)
    try:
        yield
    finally:
        minimal_attn._C.limit_cpu_instructions(before)


def ours(backend: str) -> str:
    return f"minimal_attn ({backend})"


def is_ours(name: str) -> bool:
    return name.startswith("minimal_attn")


def serves(backend: str, device: str, dtype: str) -> bool:
    q = torch.zeros(1, 1, 1, 8, dtype=getattr(torch, dtype), device=device)
    try:
        minimal_attn.forward(q, q, q, backend=backend)
    except (ValueError, RuntimeError):
        return False
    return True


def backends_for(args) -> list[str]:
    """The backends to measure, all of this device."""
    here = [name for name in minimal_attn._C.backends() if (name == "cpu") == (args.device == "cpu")]
    for name in args.backend or []:
        if name not in here:
            args.error(f"--backend {name}: on {args.device} this build has {' '.join(here)}")
    if args.mode == "profile":
        return args.backend or ["auto"]
    return args.backend or [name for name in here if args.mode in ("ladder", "overhead") or name != "paper"]


def peers_for(args, dtype: str) -> dict[str, tuple]:
    """By name: a function of (q, k, v, causal), and the context to call it in, entered once a turn."""
    if args.softcap:
        return peers_with_softcap(args, dtype)
    peers = {"manual": (manual, nullcontext)}
    if args.device == "cpu":
        peers["SDPA"] = sdpa, nullcontext
    elif dtype == "float32":
        if args.part == "forward":
            peers["manual TF32"] = manual, tf32
        peers["SDPA efficient"] = sdpa, partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)
    else:
        peers["SDPA flash"] = sdpa, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
        peers["SDPA cuDNN"] = sdpa, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
        if args.part != "forward":
            peers["SDPA efficient"] = sdpa, partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)
        elif dtype == "bfloat16" and find_spec("fa3_fwd_interface"):
            peers["FlashAttention-3"] = flash_attention_3, nullcontext
    for name in args.backend:
        if serves(name, args.device, dtype):
            peers[ours(name)] = partial(minimal_attn.forward, backend=name), nullcontext
    if args.mode == "ladder" and ours("cpu") in peers:
        function, _ = peers.pop(ours("cpu"))
        for name in reversed(minimal_attn._C.cpu_instructions()):
            peers[f"{ours('cpu')}, {name}"] = function, partial(cpu_instructions, name)
    return peers


def peers_with_softcap(args, dtype: str) -> dict[str, tuple]:
    """The same. PyTorch's SDPA has no softcap."""
    functions = {"manual": manual}
    if args.device == "cuda":
        functions["FlexAttention"] = flex_attention
    if (
        args.device == "cuda"
        and dtype == "bfloat16"
        and args.part == "forward"
        and find_spec("fa3_fwd_interface")
    ):
        functions["FlashAttention-3"] = flash_attention_3
    for name in args.backend:
        if serves(name, args.device, dtype):
            functions[ours(name)] = partial(minimal_attn.forward, backend=name)
    return {name: (partial(f, softcap=args.softcap), nullcontext) for name, f in functions.items()}
