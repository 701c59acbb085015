"""Attention of one long sequence over several processes.

    torchrun --nproc-per-node 4 examples/ring.py                       # gloo on CPUs
    torchrun --nproc-per-node 4 examples/ring.py --length 100000       # NCCL, where each process has a GPU

With minimal_attn installed; after `make build` alone, put PYTHONPATH=. before the command.
Each rank holds its part of the queries, keys and values. Rank 0 gathers the parts of the result and compares
some rows with float64.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

import minimal_attn
from minimal_attn import ring


def main():
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    parser.add_argument("--length", type=int, default=4099, help="of the sequence")
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), help="of queries and of keys")
    parser.add_argument("--head-dim", type=int, default=64, help="d (torchrun takes --d for one of its own)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits for another one")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() > local_rank
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # Every rank draws the whole sequence, so that it can be checked; a model would compute its part alone.
    torch.manual_seed(0)
    Hq, Hkv = args.heads
    whole = [torch.randn(1, H, args.length, args.head_dim) for H in (Hq, Hkv, Hkv)]
    whole = [x.to(device, getattr(torch, args.dtype)) for x in whole]
    q, k, v = (ring.shard(x, rank, ranks) for x in whole)
    options = dict(causal=not args.full)

    o = ring.forward(q, k, v, **options, timeout=args.timeout)
    seconds = best_time(lambda: ring.forward(q, k, v, **options, timeout=args.timeout), device)

    shards = [None] * ranks if rank == 0 else None
    dist.gather_object(o.cpu(), shards)
    if rank == 0:
        rows, expected = some_rows(*whole, **options)
        error = (ring.unshard(shards)[:, :, rows].double() - expected).norm() / expected.norm()
        alone = best_time(lambda: minimal_attn.forward(*whole, **options), device)
        print(f"{ranks} ranks on {device.type}, {args.dtype}, length {args.length}, {options}")
        print(f"  ring {seconds * 1e3:.1f} ms, one process alone {alone * 1e3:.1f} ms")
        print(f"  error against float64 {error:.1e}")
        assert error < {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}[args.dtype]
    dist.barrier()
    dist.destroy_process_group()


def best_time(call, device, repeats=5):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def some_rows(q, k, v, causal):
    """Manual attention in float64 for 100 of the queries."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    N = q.shape[2]
    rows = torch.linspace(0, N - 1, 100).long().unique()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.arange(N) > rows[:, None], -torch.inf)
    return rows, s.softmax(-1) @ v


if __name__ == "__main__":
    main()
