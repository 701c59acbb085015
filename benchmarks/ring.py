"""Ring attention on the GPUs of one host, beside PyTorch's context_parallel and one GPU alone.

    torchrun --nproc-per-node 2 -m benchmarks.ring               # in the repository's root, behind make build

Every call begins when all ranks are ready, and its time is that of the slowest rank; the median of all turns,
which peers take one after the other. The ideal is one GPU's time for the whole sequence, divided by the
number of GPUs: `alone`, while the others wait, and `each`, where all GPUs compute it at the same time.
context_parallel takes cuDNN's kernel.
"""

import argparse
import os
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal_attn
from minimal_attn import ring

CASES = {  # N, Hq, Hkv, d, causal, dtype
    "16k": (16384, 32, 8, 128, True, torch.bfloat16),
    "64k": (65536, 32, 8, 128, True, torch.bfloat16),
    "128k": (131072, 16, 16, 128, True, torch.bfloat16),
    "full": (65536, 16, 16, 64, False, torch.bfloat16),
    "float32": (65536, 32, 8, 128, True, torch.float32),
}


def attention_of(name: str, causal: bool):
    if name == "context_parallel":
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    forward = ring.forward if name == "ring" else minimal_attn.forward
    return lambda q, k, v: forward(q, k, v, causal=causal)


class Peer:
    """One way to compute a case, and the times of its turns. `why`: it can't."""

    def __init__(self, name: str, case, mesh):
        self.name, self.case, self.mesh, self.why = name, case, mesh, ""
        self.times: dict[str, list[float]] = {"forward": [], "both": []}

    def tensors(self) -> list[torch.Tensor]:
        N, Hq, Hkv, d, _, dtype = self.case
        torch.manual_seed(0)
        whole = [torch.randn(1, H, N, d, device="cuda", dtype=dtype) for H in (Hq, Hkv, Hkv)]
        mine = dist.get_rank(), dist.get_world_size()
        return [ring.shard(x, *mine) for x in whole] if self.name == "ring" else whole

    def take_turn(self, what: str) -> None:
        """Two calls that aren't timed, and two that are."""
        if self.why:
            return
        qkv, attention = self.tensors(), attention_of(self.name, self.case[4])
        context = nullcontext()
        if self.name == "context_parallel":
            context = context_parallel(self.mesh, buffers=qkv, buffer_seq_dims=[2, 2, 2])
        try:
            with context, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                inputs, do = [x.detach().requires_grad_() for x in qkv], torch.randn_like(qkv[0])
                calls = {
                    "forward": lambda: attention(*qkv),
                    "both": lambda: torch.autograd.grad(attention(*inputs), inputs, do),
                }
                seconds = [time_of(calls[what], self.name == "alone") for _ in range(4)]
                self.times[what] += seconds[2:]
        except (RuntimeError, NotImplementedError) as error:
            self.why = str(error).splitlines()[0]

    def median(self, what: str) -> float | None:
        return None if self.why else 1e3 * statistics.median(self.times[what])


def time_of(call, alone: bool) -> float:
    """Seconds of a call on the slowest rank; alone: on rank 0 while the others wait."""
    dist.barrier()
    torch.cuda.synchronize()
    begin, why = time.perf_counter(), ""
    try:
        if not alone or dist.get_rank() == 0:
            call()
            torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    seconds = torch.tensor(torch.inf if why else time.perf_counter() - begin, device="cuda")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if seconds.isinf():
        raise RuntimeError(why or "failed on another rank")
    return seconds.item()


PEERS = ["ring", "context_parallel", "alone", "each"]


def print_case(case, peers: list[Peer]) -> None:
    N, Hq, Hkv, d, causal, dtype = case
    title = f"{N}, {Hq}/{Hkv}, {d}, {'causal' if causal else 'full'}, {str(dtype).removeprefix('torch.')}"
    for what in "forward", "both":
        ms = {peer.name: peer.median(what) for peer in peers}
        row = "".join(f"{ms[name]:>17.2f}" if ms.get(name) else f"{'-':>17}" for name in PEERS)
        shares = ""
        for ideal in "alone", "each":
            known = ms[ideal] and ms["ring"]
            shares += f" {ms[ideal] / dist.get_world_size() / ms['ring']:.2f}" if known else "    -"
        print(f"{title:36} {what:8}{row}  {shares}", flush=True)
    for peer in peers:
        if peer.why:
            print(f"  {peer.name}: {peer.why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turns", type=int, default=5, help="of each peer; two calls of each count")
    parser.add_argument("--only-ours", action="store_true", help="without context_parallel")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
        titles = "".join(f"{name:>17}" for name in PEERS)
        print(f"{'N, heads, d':36} {'pass, ms':8}{titles}   share of alone, each")
    for name in args.case:
        peers = [Peer(x, CASES[name], mesh) for x in PEERS if x != "context_parallel" or not args.only_ours]
        for what in "forward", "both":
            for turn in range(args.turns):
                for place in range(len(peers)):  # each turn begins with another peer
                    peers[(turn + place) % len(peers)].take_turn(what)
        if dist.get_rank() == 0:
            print_case(CASES[name], peers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
