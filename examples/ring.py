"""Attention of one long sequence over several processes.

    torchrun --nproc-per-node 4 examples/ring.py                       # gloo on CPUs
    torchrun --nproc-per-node 4 examples/ring.py --length 100000       # NCCL, where each process has a GPU

With minimal_attn installed; after `make build` alone, put PYTHONPATH=. before the command. Each rank holds
its part of the queries, keys and values. Rank 0 gathers the parts of the result and compares some rows with
float64. With --train, a small model learns to name the first token of a sequence at every later one: each
rank has its part of the tokens, and the gradients of the weights are summed.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

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
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="train a model so many steps")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits for another one")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() > local_rank
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    (train if args.train else measure)(args, device, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group: findings/torch_optimizer_keeps_process_group.sh


def measure(args, device, rank, ranks):
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


class Model(torch.nn.Module):
    """Tokens and positions, one attention over all ranks, scores of all tokens."""

    def __init__(self, args, tokens=64):
        super().__init__()
        self.heads, d = args.heads, args.head_dim
        width = self.heads[0] * d
        self.token, self.position = torch.nn.Embedding(tokens, width), torch.nn.Embedding(args.length, width)
        self.qkv = torch.nn.Linear(width, (self.heads[0] + 2 * self.heads[1]) * d, bias=False)
        self.out = torch.nn.Linear(width, tokens)

    def forward(self, tokens, positions, timeout):
        x = self.token(tokens) + self.position(positions)
        Hq, Hkv = self.heads
        heads = self.qkv(x).unflatten(-1, (Hq + 2 * Hkv, -1)).transpose(1, 2)
        q, k, v = heads.split([Hq, Hkv, Hkv], dim=1)
        o = ring.forward(q, k, v, causal=True, timeout=timeout)
        return self.out(o.transpose(1, 2).flatten(2))


def train(args, device, rank, ranks):
    torch.manual_seed(0)  # the same weights and tokens on all ranks
    model = Model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = ring.shard(torch.arange(args.length, device=device)[None], rank, ranks, dim=1)
    for step in range(args.train):
        tokens = torch.randint(64, (1, args.length), device=device)
        mine, first = ring.shard(tokens, rank, ranks, dim=1), tokens[0, 0]
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            scores = model(mine, positions, args.timeout)[0]
        loss = F.cross_entropy(scores.float(), first.expand(len(scores)), reduction="sum") / args.length
        optimizer.zero_grad()
        loss.backward()  # of this rank's loss; the gradients of all losses' sum follow
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        dist.all_reduce(loss)
        if rank == 0 and (step % 20 == 0 or step == args.train - 1):
            print(f"step {step:4}: loss {loss.item():.3f}")


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
