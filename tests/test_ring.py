"""ring.py with one to four processes: what it computes against float64."""

import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import DTYPES, check_o
from reference import Attention, attention, gradients, visible_keys
from ring_processes import needs_gpus, raise_first, run, unwritten_is_nan  # noqa: F401

import minimal_attn
from minimal_attn import _peers, _ring_passes, ring
from minimal_attn._ring_masks import Mask

# ------------------------------------------------------------------------------------ the zigzag


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("N", [0, 1, 5, 12, 100])
def test_shard_and_unshard(ranks, N):
    x = torch.randn(2, 3, N, 4)
    shards = [ring.shard(x, rank, ranks) for rank in range(ranks)]
    assert torch.equal(ring.unshard(shards), x)
    assert torch.equal(ring.unshard([s.mT for s in shards], dim=3), x.mT)
    lengths = [s.shape[2] for s in shards]
    assert sum(lengths) == N and max(lengths) - min(lengths) <= 2
    for rank, s in enumerate(shards):
        positions = ring.shard(torch.arange(N), rank, ranks, dim=0)
        assert torch.equal(s, x[:, :, positions]) and (positions.diff() > 0).all()


def test_rank_has_chunks_from_both_ends():
    assert [ring.segments(80, rank, 4) for rank in range(4)] == [
        [(0, 10), (70, 80)],
        [(10, 20), (60, 70)],
        [(20, 30), (50, 60)],
        [(30, 50)],
    ]


def test_unshard_refuses_other_lengths():
    with pytest.raises(ValueError, match=r"shards must have .* but have \[3, 9\]"):
        ring.unshard([torch.ones(1, 1, 3, 1), torch.ones(1, 1, 9, 1)])


# ------------------------------------------------------------------------------------ the masks


def drawn_mask(generator, ranks):
    """A mask of a whole sequence, and the arguments of forward that mean the same."""
    Nq, Nk, kind, left, right = torch.randint(0, 40, (5,), generator=generator).tolist()
    Nq, Nk, kind = Nq + 1, Nk + 1, kind % 4
    band = (left if kind % 2 else -1, right if kind > 1 else 0)
    if kind < 3:
        offset = left - right
        if right % 8 == 0:  # as far as an int of 64 bits goes
            band, offset = (band[0], max(band[1], 2**63 - 1 - right)), (right - 2**63) // 2
        return Mask(Nq, Nk, offset, band, None, ranks), dict(window_size=band, offset=offset)
    cu_q = bounds_of_documents(Nq, generator)
    if is_self := left % 2:
        Nk = Nq
    cu_k = cu_q if is_self else bounds_of_documents(Nk, generator)
    documents = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return Mask(Nq, Nk, 0, band, (cu_q, cu_k), ranks), dict(documents, window_size=band)


def test_masks_of_parts(seed):
    """Together the parts of all ranks' calls are the mask of the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(200):
        ranks = number % 8 + 1
        mask, options = drawn_mask(generator, ranks)
        seen = torch.zeros(mask.Nq, mask.Nk, dtype=torch.bool)
        for rank, owner in itertools.product(range(ranks), repeat=2):
            rows = ring.shard(torch.arange(mask.Nq), rank, ranks, dim=0)
            keys = ring.shard(torch.arange(mask.Nk), owner, ranks, dim=0)
            if part := mask.part(rank, owner):
                rows, keys = rows[part.rows], keys[part.keys]
                sees = part.band
                if sees is None:
                    sees = dict(key_ranges=mask.key_ranges(part, torch.device("cpu")))
                seen[rows[:, None], keys] = visible_keys(1, len(rows), len(keys), **sees)[0, 0]
        assert torch.equal(seen, visible_keys(1, mask.Nq, mask.Nk, **options)[0, 0]), (mask, options)


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_slices_of_heads(heads):
    """Each head is in one slice, and the first and the last one have some, if there are two."""
    q, k = torch.empty(1, 3 * heads, 1, 1), torch.empty(1, heads, 1, 1)
    for ends in (0.75, 1), (0.25, 0.5, 1):
        slices = _ring_passes.slices_of_heads(q, k, ends)
        assert len(slices) == len(ends) and slices[-1] and (slices[0] or heads == 1)
        for x, which in (q, 0), (k, 1):
            found = [head for some in slices if some for head in range(some[which][1], sum(some[which][1:]))]
            assert found == list(range(x.shape[1]))


# ------------------------------------------------------------------------------------ the attention

BANDS = [
    {},
    dict(causal=True),
    dict(causal=True, softmax_scale=-0.3),
    dict(causal=True, softcap=1.5),
    dict(window_size=(30, 0)),
    dict(window_size=(7, 12), offset=11),
    dict(causal=True, offset=-20),
]
SIZES = [  # B, Hq, Hkv, Nq, Nk, d
    (2, 4, 2, 128, 128, 32),
    (1, 2, 2, 131, 131, 64),
    (1, 6, 1, 77, 150, 40),
    (2, 2, 1, 150, 33, 16),
    (1, 2, 1, 5, 5, 16),
    (1, 2, 1, 1, 0, 16),
    (1, 2, 1, 0, 9, 16),
]


LAYOUTS = {  # of (B, H, N, d)
    "contiguous": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "rows apart": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
}


def check_all(rank, ranks, device, seed, layout):
    """Each size with each band, in one of the dtypes."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = itertools.cycle(DTYPES[seed % 3 :] + DTYPES[: seed % 3] + DTYPES[:1])
    for (B, Hq, Hkv, Nq, Nk, d), band in itertools.product(SIZES, BANDS):
        dtype = next(dtypes)
        shapes = (B, Hq, Nq, d), (B, Hkv, Nk, d), (B, Hkv, Nk, d)
        whole = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        expected = Attention(*(ring.shard(x, rank, ranks) for x in attention(*whole, **band)))
        shards = [ring.shard(x, rank, ranks) for x in whole]
        shards = [LAYOUTS[layout](x) for x in shards]
        o, lse = ring.forward(*shards, **band, return_lse=True)
        try:
            assert o.dtype == dtype and lse.dtype == torch.float32
            if layout != "channels last":  # its rows aren't contiguous
                assert o.stride() == torch.empty_like(shards[0]).stride()
            check_o(o, expected, dtype)
            # docs/scores.md: tanh of bfloat16 on a GPU
            is_approximate = device.type == "cuda" and dtype == torch.bfloat16 and "softcap" in band
            close = dict(rtol=2e-6, atol=1e-4 if is_approximate else 2e-6)
            torch.testing.assert_close(lse.double(), expected.m + expected.l.log(), **close)
            assert torch.equal(ring.forward(*shards, **band), o)
        except AssertionError as error:
            case = f"{ranks} ranks, {(B, Hq, Hkv, Nq, Nk, d)}, {dtype}, {band}"
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.parametrize("ranks, layout", list(zip([1, 2, 3, 4], LAYOUTS, strict=True)))
def test_against_float64(ranks, layout, transport, seed):
    needs_gpus(transport, ranks)
    raise_first(run(check_all, ranks, seed, layout, transport=transport))


def check_gradients(rank, ranks, device, seed):
    """Each size with one of the bands; the loss depends on o, or on o and the log-sum-exp."""
    generator = torch.Generator().manual_seed(seed)
    cases = zip(SIZES[:-1] + SIZES[:2], itertools.cycle(BANDS[seed % 6 :] + BANDS[: seed % 6]), strict=False)
    for number, ((B, Hq, Hkv, Nq, Nk, d), band) in enumerate(cases):
        dtype = DTYPES[(seed + number) % 3]
        shapes = (B, Hq, Nq, d), (B, Hq, Nq, d), (B, Hkv, Nk, d), (B, Hkv, Nk, d)
        do, q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        dlse = torch.randn(B, Hq, Nq, generator=generator).to(device) if number % 2 else None
        expected = gradients(do, q, k, v, dlse, **band)
        inputs = [ring.shard(x, rank, ranks).requires_grad_() for x in (q, k, v)]
        outputs = ring.forward(*inputs, **band, return_lse=True)[: 1 if dlse is None else 2]
        above = [ring.shard(x, rank, ranks) for x in (do, dlse)[: len(outputs)]]
        found = torch.autograd.grad(outputs, inputs, above)
        for name, x, whole in zip("qkv", found, expected, strict=True):
            mine = ring.shard(whole, rank, ranks)
            size = max(whole.norm(), whole.numel() ** 0.5 / 10)  # where each row sees one key dq is 0
            error = (x.double() - mine).norm() / max(size, 1e-9)
            bound = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}[dtype]
            assert x.dtype == dtype and error < bound, f"d{name}, case {number}, {dtype}, {band}: {error:.1e}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients(ranks, transport, seed):
    needs_gpus(transport, ranks)
    raise_first(run(check_gradients, ranks, seed, transport=transport))


def odd_gradients(rank, ranks, device):
    """Tensors that are not what memory holds, rows that are not contiguous, layers in another order."""
    x = torch.randn(3, 1, 2, 30, 16, device=device).transpose(-1, -2).contiguous().transpose(-1, -2)
    inputs = [part.detach().requires_grad_() for part in x]
    o, lse = ring.forward(*inputs, causal=True, return_lse=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    expected = torch.autograd.grad((o, lse), inputs, (do, dlse), retain_graph=True)
    negated = [torch._neg_view(-x) for x in (do, dlse)]
    negated = torch.autograd.grad((o, lse), inputs, negated, retain_graph=True)
    for found, known in zip(negated, expected, strict=True):
        torch.testing.assert_close(found, known)
    zeros = torch._efficientzerotensor(o.shape, device=device)
    assert not any(x.any() for x in torch.autograd.grad(o, inputs, zeros, retain_graph=True))
    empty = torch.randn(0, 2, 16, 8, device=device).transpose(2, 3)  # its rows aren't contiguous
    assert ring.forward(empty, empty, empty).shape == empty.shape
    doubled = (2 * inputs[0]).contiguous()
    o = ring.forward(doubled, *inputs[1:], timeout=20)
    if rank == 0:
        doubled.mul_(2)
    with pytest.raises(RuntimeError, match="^rank 0: one of the variables .* by an inplace operation"):
        o.sum().backward()
    first, second = (ring.forward(*inputs, causal=causal, timeout=20).sum() for causal in (True, False))
    with pytest.raises(ValueError, match="number of the forward call must be the same on all ranks"):
        (first if rank == 0 else second).backward()


def test_odd_gradients():
    raise_first(run(odd_gradients, 2))


def bounds_of_documents(N, generator):
    """Five documents, some of them maybe empty, and maybe tokens of none before and behind."""
    return torch.randint(0, N + 1, (6,), generator=generator).sort().values.int()


def check_documents(rank, ranks, device, seed):
    """Packed documents of the whole sequence: values and gradients."""
    generator = torch.Generator().manual_seed(seed)
    masks = {}, dict(causal=True), dict(window_size=(9, 4)), dict(causal=True, window_size=(30, -1))
    for number, (mask, is_self) in enumerate(itertools.product(masks, (True, False))):
        dtype, (Nq, Nk) = DTYPES[(seed + number) % 3], (200, 200) if is_self else (150, 230)
        cu_q = bounds_of_documents(Nq, generator).to(device)
        cu_k = cu_q if is_self else bounds_of_documents(Nk, generator).to(device)
        options = dict(mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        shapes = (1, 4, Nq, 32), (1, 4, Nq, 32), (1, 2, Nk, 32), (1, 2, Nk, 32)
        do, q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        expected = Attention(*(ring.shard(x, rank, ranks) for x in attention(q, k, v, **options)))
        inputs = [ring.shard(x, rank, ranks).requires_grad_() for x in (q, k, v)]
        o, lse = ring.forward(*inputs, **options, return_lse=True)
        check_o(o, expected, dtype)
        torch.testing.assert_close(lse.double(), expected.m + expected.l.log(), rtol=2e-6, atol=2e-6)
        found = torch.autograd.grad(o, inputs, ring.shard(do, rank, ranks))
        for x, whole in zip(found, gradients(do, q, k, v, **options), strict=True):
            size = max(whole.norm(), whole.numel() ** 0.5 / 10)
            bound = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}[dtype]
            error = (x.double() - ring.shard(whole, rank, ranks)).norm() / size
            assert error < bound, f"{ranks} ranks, {dtype}, {options}: {error:.1e}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])  # of 6 each takes a buffer again
def test_documents(ranks, transport, seed):
    needs_gpus(transport, ranks)
    raise_first(run(check_documents, ranks, seed, transport=transport))


WRONG_DOCUMENTS = [
    ((dict(cu_seqlens_q=[0, 4])), TypeError, "cu_seqlens_k must be a tensor"),
    (dict(cu_seqlens_q=[0, 4, 8], cu_seqlens_k=[0, 8]), ValueError, "cu_seqlens_k .* length 3, but has 2"),
    (dict(cu_seqlens_q=[0, 9], cu_seqlens_k=[0, 8]), ValueError, "cu_seqlens_q must end at the whole"),
    (dict(cu_seqlens_q=[0, 4, 3], cu_seqlens_k=[0, 4, 8]), ValueError, "cu_seqlens_q must .* never decrease"),
    (dict(cu_seqlens_q=[0, 2**62, -(2**62)], cu_seqlens_k=[0, 4, 8]), ValueError, "cu_seqlens_q .* decr"),
    (dict(cu_seqlens_q=[[0, 8]], cu_seqlens_k=[0, 8]), ValueError, r"cu_seqlens_q must be \(doc"),
    (dict(cu_seqlens_q=[0.0, 8], cu_seqlens_k=[0, 8]), ValueError, "cu_seqlens_q must .* an integer dtype"),
    (dict(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8], offset=1), ValueError, "offset must be None with"),
]


def wrong_documents(rank, ranks, device):
    x = torch.randn(1, 1, 8 // ranks, 16)
    for wrong, kind, text in WRONG_DOCUMENTS:
        options = {name: torch.tensor(value) if name != "offset" else value for name, value in wrong.items()}
        with pytest.raises(kind, match=text) as error:
            ring.forward(x, x, x, timeout=20, **options)
        assert "\n" not in str(error.value)
    same, other = torch.tensor([0, 4, 8]), torch.tensor([0, 3 + rank, 8])
    ring.forward(x, x, x, timeout=20, cu_seqlens_q=same, cu_seqlens_k=same)
    for cu_q, cu_k, text in (
        (other, other, "cu_seqlens_q must be the same on all ranks, but was 2 documents"),
        (same, same.clone() if rank else same, "cu_seqlens_k must .* cu_seqlens_q itself on rank 0 and"),
        (same if rank else None, same if rank else None, "cu_seqlens_q must .* None on rank 0 and"),
        (None if rank else same, None if rank else same, "cu_seqlens_q must .* None on rank 1"),
    ):
        with pytest.raises(ValueError, match=text):
            ring.forward(x, x, x, timeout=20, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_wrong_documents():
    raise_first(run(wrong_documents, 2))


def check_autocast(rank, ranks, device):
    """Results and gradients are those of inputs that were cast before."""
    q, k, v = torch.randn(3, 1, 2, 60, 32, generator=torch.Generator().manual_seed(5)).to(device)
    inputs = [ring.shard(4 * x, rank, ranks).requires_grad_() for x in (q, k, v)]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o = ring.forward(*inputs, causal=True)
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected = ring.forward(*rounded, causal=True)
    assert torch.equal(o, expected)
    results = torch.autograd.grad(o.sum(), inputs), torch.autograd.grad(expected.sum(), rounded)
    assert all(torch.equal(x, y.float()) for x, y in zip(*results, strict=True))
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(ValueError, match="q must be"):
        ring.forward(*(x.detach().double() for x in inputs))


def test_autocast():
    raise_first(run(check_autocast, 2))


def count_digits(rank, ranks, device, seed):
    """How many bfloat16 elements aren't the nearest ones: of one process, and of this rank."""
    q, k, v = torch.randn(3, 1, 1, 300, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    nearest = attention(q, k, v).o.bfloat16()
    alone = minimal_attn.forward(q, k, v) != nearest
    o = ring.forward(*(ring.shard(x, rank, ranks) for x in (q, k, v)))
    return int(alone.sum()), int((o != ring.shard(nearest, rank, ranks)).sum())


def test_merging_loses_no_digits(seed):
    """Where blocks are rounded to bfloat16 and then merged, every second element of o is another one."""
    results = run(count_digits, 4, seed)
    raise_first(results)
    alone, parts = zip(*results, strict=True)
    print(f"not the nearest of {300 * 64}: {alone[0]} of one process, {sum(parts)} of four ranks")
    assert sum(parts) <= alone[0] + 0.02 * 300 * 64


def sizes_of_calls(rank, ranks, device):
    """(queries, keys) of each call of a kernel, under a causal mask and under a short window."""
    sizes = []
    plain = _ring_passes.forward_into

    def counting(q, k, *arguments, **options):
        sizes.append((q.shape[2], k.shape[2]))
        plain(q, k, *arguments, **options)

    _ring_passes.forward_into = counting
    x = torch.randn(1, 1, 800 // ranks, 16)
    ring.forward(x, x, x, causal=True)
    causal = list(sizes)
    sizes.clear()
    ring.forward(x, x, x, window_size=(10, 0))
    return causal, sizes


def test_hidden_blocks_are_not_computed():
    """A block is one call. Each rank has the same causal work; a short window needs a chunk and the one
    before.
    """
    results = run(sizes_of_calls, 4)
    raise_first(results)
    causal, window = zip(*results, strict=True)
    for rank, sizes in enumerate(causal):  # half of the keys, or half of the queries
        assert sizes == [(200, 200)] + [(200, 100)] * rank + [(100, 200)] * (3 - rank)
    own, chunk = (200, 200), (100, 100)  # rank 3's chunks are neighbours, and count as one
    assert window == ([own, chunk], [own, chunk, chunk], [own, chunk, (100, 200)], [own, (200, 100)])


@pytest.mark.parametrize("options", [{}, dict(causal=True)], ids=["full", "causal"])
def test_eight_ranks_share_the_work(options):
    """Each rank's parts have the same number of visible pairs, within 2 %."""
    N, ranks = 4099, 8
    mask = Mask(N, N, 0, (-1, 0 if options else -1), None, ranks)
    pairs = []
    for rank in range(ranks):
        positions = ring.shard(torch.arange(N), rank, ranks, dim=0)
        seen = 0
        for owner in range(ranks):
            keys = ring.shard(torch.arange(N), owner, ranks, dim=0)
            part = mask.part(rank, owner)
            visible = keys[part.keys] <= positions[part.rows][:, None] if options else torch.ones(1)
            seen += int(visible.expand(len(positions[part.rows]), len(keys[part.keys])).sum())
        pairs.append(seen)
    assert max(pairs) <= 1.02 * min(pairs)
    assert sum(pairs) == (N * (N + 1) // 2 if options else N * N)


def sent_blocks(rank, ranks, device):
    """The sizes of what this rank sends, forward, then backward."""
    sent, start = [], _peers.Peers.start

    def counting(self, transfers, *events):
        sent.append([going.numel() for going, _ in transfers])
        return start(self, transfers, *events)

    _peers.Peers.start = counting
    x = torch.randn(1, 1, 4 * ranks, 16, requires_grad=True)
    o = ring.forward(x, x, x, causal=True)
    forward = list(sent)
    sent.clear()
    o.sum().backward()
    return forward, sent


def test_eight_ranks_send_each_block_once():
    """Seven times a pass; gradients travel one step behind their block, the last one home."""
    results = run(sent_blocks, 8)
    raise_first(results)
    block = 4 * 8 * 16
    for forward, backward in results:
        assert forward == [[block, block]] * 7
        assert backward == [[block, block]] * (7 + 7)


def in_a_subgroup(rank, ranks, device):
    group = dist.new_group([1, 2])
    x = torch.randn(1, 1, 10, 16)
    if rank in (1, 2):
        time.sleep(0.4 * (rank - 1))  # the other one waits
        return ring.forward(x, x, x, group=group).shape
    with pytest.raises(ValueError, match="group must be a process group that has this rank"):
        ring.forward(x, x, x, group=group)


def test_subgroup():
    assert run(in_a_subgroup, 3) == [None, (1, 1, 10, 16), (1, 1, 10, 16)]


def test_needs_a_process_group():
    x = torch.randn(1, 1, 10, 16)
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group"):
        ring.forward(x, x, x)


def captured(rank, ranks, device):
    """A graph of both passes is replayed with other values."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(3, 1, 4, 500, 64, generator=generator).to(device, torch.bfloat16)
    inputs = [ring.shard(x, rank, ranks).requires_grad_() for x in whole]

    def both():
        o = ring.forward(*inputs, causal=True)
        return o, *torch.autograd.grad(o, inputs, torch.ones_like(o))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = both()
    for x, change in zip(inputs, torch.randn(3, 1, 4, 500, 64, generator=generator), strict=True):
        x.data += ring.shard(change, rank, ranks).to(x)
    graph.replay()
    for found, expected in zip(results, both(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # dq may vary in its last bits


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_graph():
    raise_first(run(captured, 2, transport="nccl"))


def changing_shapes(rank, ranks, device, seed):
    """Many calls, with a few arguments that return: values, and memory that doesn't grow."""
    generator = torch.Generator().manual_seed(seed)
    kept = 0
    for number in range(100):
        drawn = torch.randint(20, 300, (2,), generator=generator).tolist()
        Nq, Nk = drawn if number % 3 else (100, 100)
        whole = [torch.randn(1, 2, N, 32, generator=generator).to(device) for N in (Nq, Nk, Nk)]
        o = ring.forward(*(ring.shard(x, rank, ranks) for x in whole), causal=bool(number % 2))
        expected = minimal_attn.forward(*whole, causal=bool(number % 2))
        torch.testing.assert_close(o, ring.shard(expected, rank, ranks), rtol=1e-4, atol=1e-5)
        del o, expected, whole
        if device.type == "cuda":
            kept = max(kept, torch.cuda.memory_allocated()) if number < 20 else kept
            assert torch.cuda.memory_allocated() <= kept


def test_changing_shapes(transport, seed):
    raise_first(run(changing_shapes, 2, seed, transport=transport))


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none")
@pytest.mark.parametrize(
    "options, said",
    [
        ([], ["2 ranks", "error against float64"]),
        (["--train=21"], ["step    0: loss 4", "step   20: loss"]),
    ],
    ids=["measure", "train"],
)
def test_example(options, said):
    root = Path(__file__).resolve().parent.parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command += [root / "examples/ring.py", "--length=333", *options]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in said)
