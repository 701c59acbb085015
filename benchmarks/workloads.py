"""What is measured: the shapes of each mode, as cells, and their random inputs."""

from collections import namedtuple
from itertools import product

import torch

SEED = (16, 12, 64, 64)  # (B, H, N, d) of the project that this one grew from
# The same memory for every N and d: 16384 tokens, hidden size 2048.
GPU = [(16384 // n, 2048 // d, n, d) for d in (64, 128, 256) for n in (512, 1024, 2048, 4096, 8192, 16384)]
SHORT = [(8, 32, 2048, 64), (2, 32, 8192, 64), (8, 16, 2048, 128), (2, 16, 8192, 128), (8, 8, 2048, 256)]
CPU = [SEED, (4, 8, 512, 64), (1, 8, 2048, 64), (1, 8, 4096, 128)]
DTYPES = ["float32", "bfloat16", "float16"]
BOTH = ["full", "causal"]
WORKLOADS = [  # mode, device, dtypes, shapes (B, H, N, d) or (B, H, N, d, Hkv), masks
    ("sweep", "cpu", ["float32"], CPU, ["full"]),
    ("sweep", "cpu", ["float32"], [(1, 8, 8192, 64)], BOTH),
    ("sweep", "cpu", ["float16", "bfloat16"], [(1, 8, 2048, 64)], ["full"]),
    ("sweep", "cuda", ["float32"], [SEED], ["full"]),
    ("sweep", "cuda", ["float32"], [s for s in GPU if s[2] in (512, 2048, 8192)], BOTH),
    ("sweep", "cuda", ["float16", "bfloat16"], GPU, BOTH),
    ("sweep backward", "cpu", ["float32"], CPU, ["full"]),
    ("sweep backward", "cpu", ["float32"], [(1, 8, 2048, 64)], ["causal"]),
    ("sweep backward", "cuda", ["bfloat16", "float16"], [s for s in GPU if s[2] < 16384], BOTH),
    ("sweep backward", "cuda", ["float32"], [s for s in GPU if s[2] in (512, 2048, 8192)], BOTH),
    ("backward", "cpu", ["float32"], [(4, 8, 512, 64), (1, 8, 2048, 64)], BOTH),
    ("backward", "cuda", ["bfloat16"], SHORT, BOTH),
    ("backward", "cuda", ["float32"], SHORT[:1], BOTH),
    ("decode", "cpu", ["float32"], [(1, 8, 2048, 64), (1, 32, 4096, 128, 8)], ["decode"]),
    ("decode", "cpu", ["float32"], [(8, 32, 2048, 64, 8)], ["decode"]),
    ("decode", "cuda", ["bfloat16"], [(1, 32, n, 128, 8) for n in (1024, 4096, 32768)], ["decode"]),
    ("decode", "cuda", ["bfloat16"], [(1, 32, 32768, 128, 32), (8, 32, 8192, 128, 8)], ["decode"]),
    ("decode", "cuda", ["bfloat16"], [(8, 32, 8192, 128, 32), (64, 32, 4096, 128, 8)], ["decode"]),
    ("decode", "cuda", ["float32"], [(8, 32, 8192, 128, 8)], ["decode"]),
    ("ladder", "cpu", DTYPES, [(1, 8, 2048, 64)], BOTH),
    ("ladder", "cuda", DTYPES, [(4, 16, 4096, 64), (4, 16, 4096, 128)], BOTH),
]
# One line of the table. Hkv None is H. With the mask "decode" one query a head sees the N keys.
Cell = namedtuple("Cell", "dtype B H N d mask Hkv", defaults=[None])


def cells_for(args) -> list[Cell]:
    rows = [row[2:] for row in WORKLOADS if row[:2] == (args.workloads, args.device)]
    rows = [product(dtypes, [args.shape] if args.shape else shapes, masks) for dtypes, shapes, masks in rows]
    cells = [Cell(dtype, *shape[:4], mask, *shape[4:]) for row in rows for dtype, shape, mask in row]
    cells = list(dict.fromkeys(cells))
    return filtered(args, cells, cells)


def filtered(args, cells: list[Cell], things: list) -> list:
    """Those of `things` whose cell the options leave, or an error that lists what there is."""
    masks = [mask for mask in ("full", "causal") if getattr(args, mask)]
    only = {"dtype": args.dtype, "d": args.d, "N": args.n, "mask": masks}

    def stays(cell: Cell) -> bool:
        is_quick = cell.N <= 2048 and cell.d <= 128
        return (is_quick or not args.quick) and all(
            not few or getattr(cell, name) in few for name, few in only.items()
        )

    found = [thing for cell, thing in zip(cells, things, strict=True) if stays(cell)]
    if not found:
        has = [
            f"{name} {' '.join(dict.fromkeys(str(getattr(cell, name)) for cell in cells))}" for name in only
        ]
        args.error(f"these filters leave no workload; there are: {', '.join(has)}")
    return found


def randn(shape, dtype: str, device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=getattr(torch, dtype), device=device)


def random_qkv(cell: Cell, device: str) -> list[torch.Tensor]:
    queries, keys = (cell.H, 1 if cell.mask == "decode" else cell.N), (cell.Hkv or cell.H, cell.N)
    return [randn((cell.B, *heads, cell.d), cell.dtype, device) for heads in (queries, keys, keys)]
