"""--ladder: every backend on one workload, and its share of the machine's limit."""

import statistics
from contextlib import nullcontext
from functools import lru_cache, partial

import torch

from .clock import progress, stopwatch
from .measure import ROUNDS, measure
from .peers import ours, peers_for, tf32
from .workloads import Cell, randn

RUNGS = {  # peer: what changed, in the order of the table
    "manual": "S and P are N x N matrices in memory",
    "minimal_attn (paper)": "Algorithm 1 as printed: S and P stay in shared memory; O, l and m in HBM",
    "minimal_attn (portable)": "the loops swapped: O, l, m in registers; float32 as three TF32 products",
    "minimal_attn (hopper)": "wgmma, TMA, producer and consumer warps; float32 as three float16 products",
    "minimal_attn (cpu)": "the loops swapped, vectors, a tile of queries a thread",
    "SDPA": "PyTorch's attention",
    "SDPA efficient": "PyTorch's attention, float32 as three TF32 products",
    "SDPA flash": "PyTorch's FlashAttention-2",
    "SDPA cuDNN": "cuDNN's attention, through PyTorch",
    "FlashAttention-3": "the package fa3_fwd",
    "manual TF32": "as manual, on tensor cores in TF32",
}


@lru_cache
def matmul_tflops(device: str, dtype: str) -> float:
    """The limit: TFLOP/s of a large matrix multiplication; "TF32" is float32 rounded by the tensor cores."""
    n = 2048 if device == "cpu" else 8192
    a, b = (randn((n, n), "float32" if dtype == "TF32" else dtype, device) for _ in range(2))
    with tf32() if dtype == "TF32" else nullcontext():
        torch.mm(a, b)
        watch = stopwatch(partial(torch.mm, a, b), device)
        return 2 * n**3 / statistics.median(watch() for _ in range(ROUNDS)) / 1e12


def limit_of(peer: str, device: str, dtype: str) -> tuple[str, int]:
    """What bounds a peer: the dtype of a matrix multiplication, and how many of them make one product."""
    # The paper's kernel computes in float32 whatever the inputs are. So do CPUs for float16.
    if peer == ours("paper") or device == "cpu" and dtype == "float16":
        return "float32", 1
    if dtype != "float32":
        return dtype, 1
    own = {ours("hopper"): ("float16", 3), "SDPA efficient": ("TF32", 3), "manual TF32": ("TF32", 1)}
    if device == "cuda" and torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= 163 << 10:
        own[ours("portable")] = ("TF32", 3)  # portable/forward.cu
    return own.get(peer, ("float32", 1))


def run_ladder(args, about: dict) -> int:
    wrong = False
    for cell in args.cells:
        peers = peers_for(args, cell.dtype)
        line = {r["peer"]: r for r in measure(cell, peers, args, f"{cell.dtype} {cell[1:5]}")}
        limits = {name: limit_of(name, args.device, cell.dtype) for name in line}
        found = {dtype: matmul_tflops(args.device, dtype) for dtype, _ in dict.fromkeys(limits.values())}
        progress()
        print_ladder(cell, line, limits, found)
        wrong |= any(r.get("ratio") == 0 for r in line.values())
    return int(wrong)


def print_ladder(cell: Cell, line: dict, limits: dict, found: dict) -> None:
    print(f"\n(B, H, N, d) = {cell[1:5]}, {cell.dtype}, {cell.mask}\n")
    print("| rung | what changed | ms | TFLOP/s | % of its limit | error |\n|---|---|---|---|---|---|")
    for rung, name in ((rung, name) for rung in RUNGS for name in line if name.split(", ")[0] == rung):
        r, (dtype, products) = line[name], limits[name]
        numbers = "- | - | - | -"
        if "failed" not in r:
            share = 100 * r["tflops"] * products / found[dtype]
            limit = f"{dtype} / {products}" if products > 1 else dtype
            numbers = f"{r['ms']:.4g} | {r['tflops']:.3g} | {share:.0f} % of {limit} | {r['error']:.1e}"
        print(f"| {name} | {RUNGS[rung]} | {numbers} |")
    speeds = ", ".join(f"{dtype} {tflops:.3g} TFLOP/s" for dtype, tflops in found.items())
    print(f"\nLimits, measured in the same run by multiplying large matrices: {speeds}.")
    for name, r in line.items():
        if "failed" in r:
            print(f"{name} failed: {r['failed']}")
