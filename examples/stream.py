"""Attention over keys that don't fit the GPU: they come in chunks, and (o, l, m) carries the softmax along.

While a chunk is computed, the next one is copied from pinned memory. Without a GPU nothing is copied.

    python examples/stream.py [--gigabytes 1] [--chunk 16384]

With minimal_attn installed; after `make build` alone: PYTHONPATH=. build/python examples/stream.py
"""

import argparse
import time

import torch

import minimal_attn

B, Hq, Hkv, Nq, d = 1, 8, 2, 128, 128
DTYPE = torch.bfloat16


def attend(q, chunks):
    """softmax(q k^T / sqrt(d)) v over all chunks, each (k, v), which come through two buffers in turns."""
    if q.device.type == "cpu":
        state = None
        for k, v in chunks:
            state = minimal_attn.forward(q, k, v, state=state, return_state=True)
        return state[0]
    compute, copy = torch.cuda.current_stream(), torch.cuda.Stream()
    buffers = [[torch.empty_like(x, device=q.device) for x in chunks[0]] for _ in range(2)]
    computed = [torch.cuda.Event() for _ in buffers]  # a buffer may be written again
    copy.wait_stream(compute)
    state = None
    for n, chunk in enumerate(chunks):
        with torch.cuda.stream(copy):
            copy.wait_event(computed[n % 2])
            k, v = (
                buffer[:, :, : x.shape[2]].copy_(x, non_blocking=True)
                for buffer, x in zip(buffers[n % 2], chunk, strict=True)
            )
        compute.wait_stream(copy)
        state = minimal_attn.forward(q, k, v, state=state, return_state=True)
        computed[n % 2].record(compute)
    return state[0]


def exact(q, chunks, row):
    """One query's attention in float64, a chunk at a time."""
    q = q[:, :, row : row + 1].cpu().double()
    scores, values = [], []
    for k, v in chunks:
        k, v = (x.double().repeat_interleave(Hq // Hkv, 1) for x in (k, v))
        s = q @ k.mT / d**0.5
        scores.append(s.logsumexp(-1, keepdim=True))
        values.append(s.softmax(-1) @ v)
    return (torch.cat(scores, -1).softmax(-1) @ torch.cat(values, -2))[:, :, 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1, help="size of all keys and values")
    parser.add_argument("--chunk", type=int, default=16384, help="keys in a chunk")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    key_bytes = 2 * B * Hkv * d * DTYPE.itemsize
    count = max(1, round(arguments.gigabytes * 1e9 / key_bytes / arguments.chunk))
    q = torch.randn(B, Hq, Nq, d, dtype=DTYPE).to(device)
    one = torch.randn(2, B, Hkv, arguments.chunk, d, dtype=DTYPE)
    chunks = []
    for _ in range(count):
        k, v = one.roll(torch.randint(d, ()).item(), -1) * torch.rand(())  # other values, quickly
        chunks.append(tuple(x.pin_memory() if device == "cuda" else x for x in (k, v)))

    attend(q, chunks[:1])  # warm up
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    o = attend(q, chunks).cpu()
    seconds = time.perf_counter() - begin
    size = count * arguments.chunk * key_bytes
    print(f"{count} chunks of {arguments.chunk} keys, {size / 1e9:.2f} GB, {device}")
    print(f"{seconds:.3f} s, {size / 1e9 / seconds:.1f} GB/s")
    if device == "cuda":
        print(f"at most {torch.cuda.max_memory_allocated() / 1e9:.3f} GB of the GPU's memory")
    expected = exact(q, chunks, Nq - 1)
    error = ((o[:, :, -1].double() - expected).norm() / expected.norm()).item()
    print(f"relative error of the last query against float64: {error:.1e}")


if __name__ == "__main__":
    main()
