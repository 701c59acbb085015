"""DTensors: attention sharded by batches or heads, with two processes, gives the values of one process."""

import subprocess
import sys

import pytest
import torch
from conftest import DTYPES, Backend
from test_ring import raise_first, run

import minimal_attn

RANKS = 2


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    """The calls are in other processes, where run() does it."""


def cases(backend, dtype):
    """q, k, v and keywords of one call, how they are sharded, and how the results must be."""
    from torch.distributed.tensor import Replicate, Shard

    batch, heads, queries, whole = Shard(0), Shard(1), Shard(2), Replicate()
    state = minimal_attn.forward(*backend.qkv(dtype=dtype), return_state=True)
    lengths = {
        "seqlens_k": backend.ints(33, 90),
        "leftpad_k": backend.ints(0, 12),
        "offset": backend.ints(5, 50),
    }
    sinks, of_batch = backend.randn(4), backend.randn(2, 4)
    usual = backend.qkv(dtype=dtype)
    return [
        (usual, {"causal": True}, batch, batch),
        (usual, {"causal": True}, heads, heads),
        (usual, {"window_size": (20, 3)}, whole, whole),
        (usual, {"causal": True}, queries, None),  # redistributed as DTensor likes
        (usual, {"causal": True, **lengths}, batch, batch),
        (usual, {"causal": True, **lengths, "return_lse": True}, heads, heads),
        (usual, {"return_state": True}, batch, batch),
        (usual, {"state": state}, heads, heads),
        (usual, {"state": state, "return_lse": True, **lengths}, batch, batch),
        (usual, {"sinks": sinks}, heads, heads),
        (usual, {"sinks": sinks, "return_lse": True}, batch, batch),
        (usual, {"sinks": of_batch}, batch, batch),
        (usual, {"sinks": of_batch, "softmax_scale": 0.2}, heads, heads),
        (usual, {"block_table": backend.ints([1, 0, 1], [0, 9, 1])}, batch, batch),
        (usual, {"block_table": backend.ints([1, 0, 1], [0, 9, 1]), "return_lse": True}, heads, heads),
        (backend.qkv(B=1, dtype=dtype), {}, batch, None),  # nothing to divide
        (backend.qkv(B=3, dtype=dtype), {"causal": True}, batch, batch),  # into 2 and 1
        (backend.qkv(Hq=6, Hkv=3, dtype=dtype), {}, heads, None),  # key heads that don't divide
        (backend.qkv(Hq=6, Hkv=1, dtype=dtype), {}, heads, heads),  # each query head reads the one key head
        (backend.qkv(Hq=3, Hkv=1, dtype=dtype), {"return_state": True}, heads, heads),
        (backend.qkv(Hq=8, Hkv=4, Nq=1, dtype=dtype), {}, heads, heads),
        # weights are dropped by the numbers of the batch and the head, so these are gathered
        *(
            (usual, {"dropout_p": 0.4, "dropout_seed": torch.tensor(5)}, given, whole)
            for given in (batch, heads)
        ),
    ]


def flat(results):
    return results if isinstance(results, tuple) else (results,)


def compare(rank, ranks, device, dtype, seed):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device.type, (ranks,))
    backend = Backend("cpu", seed)
    for tensors, options, given, wanted in cases(backend, dtype):

        def share(x, given=given):
            if isinstance(x, tuple):
                return tuple(map(share, x)) if isinstance(x[0], torch.Tensor) else x
            if not isinstance(x, torch.Tensor):
                return x
            divides = x.dim() > getattr(given, "dim", 0)
            return distribute_tensor(x, mesh, [given if divides else Replicate()], src_data_rank=None)

        expected = flat(minimal_attn.forward(*tensors, **options))
        actual = flat(minimal_attn.forward(*map(share, tensors), **{n: share(x) for n, x in options.items()}))
        about = f"{[tuple(t.shape) for t in tensors]} {sorted(options)} {given}"
        assert len(actual) == len(expected), about
        for t, e in zip(actual, expected, strict=True):
            assert wanted is None or t.placements == (wanted,), f"{about}: {t.placements}"
            assert t.dtype == e.dtype and t.shape == e.shape, about
            assert torch.equal(t.full_tensor(), e), about


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sharded(dtype, seed):
    """The same bits: neither batches nor heads change each other's."""
    raise_first(run(compare, RANKS, dtype, seed))


def compile_and_refuse(rank, ranks, device, seed):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device.type, (ranks,))
    tensors = Backend("cpu", seed).qkv()
    q, k, v = (distribute_tensor(t, mesh, [Shard(1)], src_data_rank=None) for t in tensors)
    with pytest.raises(ValueError, match="^out must be None for DTensors"):
        minimal_attn.forward(q, k, v, out=torch.zeros_like(q))
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        minimal_attn.forward(q, *tensors[1:])
    forward = torch.compile(lambda q, k, v: minimal_attn.forward(q, k, v, causal=True), backend="aot_eager")
    actual = forward(q, k, v)
    assert actual.placements == (Shard(1),)
    assert torch.equal(actual.full_tensor(), minimal_attn.forward(*tensors, causal=True))


def differentiate(rank, ranks, device, seed):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device.type, (ranks,))
    backend = Backend("cpu", seed)
    for Hkv in 2, 1:
        tensors = [t.requires_grad_() for t in backend.qkv(Hkv=Hkv)]
        do = torch.ones_like(tensors[0])
        expected = torch.autograd.grad(minimal_attn.forward(*tensors, causal=True), tensors, do)
        for given in Shard(0), Shard(1), Shard(2):
            places = [given] + [given if given != Shard(1) or Hkv > 1 else Replicate()] * 2
            shards = zip(tensors, places, strict=True)
            inputs = [distribute_tensor(t.detach(), mesh, [p], src_data_rank=None) for t, p in shards]
            inputs = [t.requires_grad_() for t in inputs]
            o = minimal_attn.forward(*inputs, causal=True)
            wanted = distribute_tensor(do, mesh, o.placements, src_data_rank=None)
            found = torch.autograd.grad(o, inputs, wanted)
            assert given == Shard(2) or (o.placements, found[0].placements) == ((given,), (given,))
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x.full_tensor(), y)


def drop(rank, ranks, device, seed):
    """All ranks draw the same seed, after the same torch.manual_seed, and drop the same weights."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device.type, (ranks,))
    tensors = [t.requires_grad_() for t in Backend("cpu", seed).qkv()]

    def results(tensors):
        torch.manual_seed(seed)
        o = minimal_attn.forward(*tensors, dropout_p=0.4, causal=True)
        return o, *torch.autograd.grad(o, tensors, torch.ones_like(o))

    for given in Shard(0), Shard(1):
        shards = (distribute_tensor(t.detach(), mesh, [given], src_data_rank=None) for t in tensors)
        for x, y in zip(results([t.requires_grad_() for t in shards]), results(tensors), strict=True):
            torch.testing.assert_close(x.full_tensor(), y)


def test_dropout(seed):
    raise_first(run(drop, RANKS, seed))


def test_gradients(seed):
    raise_first(run(differentiate, RANKS, seed))


def test_compiled_and_refused(seed):
    raise_first(run(compile_and_refuse, RANKS, seed))


MESH_OF_FOUR = """
import sys
import torch, torch.distributed as dist
import minimal_attn
assert "torch.distributed.tensor" not in sys.modules, "it takes 0.4 s"
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
for given, Hkv, wanted in [
    ((Shard(0), Shard(1)), 2, (Shard(0), Shard(1))),
    ((Shard(1), Shard(1)), 4, (Shard(1), Shard(1))),
    ((Shard(1), Shard(1)), 2, None),  # two key heads have no four parts
    ((Shard(1), Shard(1)), 6, (Replicate(), Replicate())),  # nor six of the same size
    ((Replicate(), Shard(0)), 1, (Replicate(), Shard(0))),
    ((Shard(1), Shard(1)), 1, (Shard(1), Shard(1))),
]:
    q, k = (
        DTensor.from_local(torch.zeros(4, H, 5, 8), mesh, [Replicate()] * 2).redistribute(mesh, given)
        for H in (4 * Hkv, Hkv)
    )
    o = minimal_attn.forward(q, k, k)
    assert o.shape == q.shape and wanted in (None, o.placements), (given, Hkv, o.placements)
    if Hkv > 1 and o.placements == given == (Shard(1), Shard(1)):
        assert Hkv % 4 == 0
"""


def test_mesh_of_two_dimensions():
    """Placements alone, without the other processes; and that the rule waits for DTensor's import."""
    done = subprocess.run([sys.executable, "-c", MESH_OF_FOUR], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
