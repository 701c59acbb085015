"""ring.py where ranks differ, are lost or raise: the others end with one error."""

import os
import re
import signal
import time

import pytest
import torch
from ring_processes import LIMIT, needs_gpus, raise_first, run, unwritten_is_nan  # noqa: F401

from minimal_attn import _peers, _ring_passes, ring

TIMEOUT = 1.0  # seconds that a rank waits for another one that is gone
BACKWARD = "ring.forward's backward pass"  # as errors name it


# ------------------------------------------------------------------------------------ odd ranks

ODD = {  # what rank 1 does differently, the error on all ranks
    "dtype": (lambda q, k, v: (q.half(), k.half(), v.half()), {}, ValueError, "dtype .* float16 on rank 1"),
    "heads": (
        lambda q, k, v: (q, k[:, :2], v[:, :2]),
        {},
        ValueError,
        "Hkv .* 4 on ranks? 0.* and 2 on rank 1",
    ),
    "d": (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), {}, ValueError, "^d must be the same"),
    "length": (
        lambda q, k, v: (q, k[:, :, 2:], v[:, :, 2:]),
        {},
        ValueError,
        r"k's length must be \[.*shard",
    ),
    "causal": (lambda *qkv: qkv, dict(causal=True), ValueError, "causal .* True on rank 1"),
    "window": (lambda *qkv: qkv, dict(window_size=(5, 0)), ValueError, r"window_size .* \[5, 0\] on rank 1"),
    "scale": (lambda *qkv: qkv, dict(softmax_scale=0.5), ValueError, "softmax_scale .* 0.5 on rank 1"),
    "softcap": (lambda *qkv: qkv, dict(softcap=2), ValueError, "softcap .* 2.0 on rank 1"),
    "timeout": (lambda *qkv: qkv, dict(timeout=0), ValueError, "rank 1: timeout must be a positive number"),
    "shape": (lambda q, k, v: (q, k, v[:, :, 1:]), {}, ValueError, "rank 1: v must have k's shape"),
    "type": (lambda q, k, v: (q, None, v), {}, TypeError, "rank 1: k must be a dense tensor"),
    "offset": (lambda *qkv: qkv, dict(offset=torch.tensor([1])), TypeError, "rank 1: offset must be an int"),
    "grad": (lambda q, k, v: (q.requires_grad_(), k, v), {}, ValueError, "requires_grad .* True on rank 1"),
    "backend": (lambda *qkv: qkv, dict(backend="best"), ValueError, "rank 1: "),
    "softcaps": (lambda *qkv: qkv, dict(softcap=torch.ones(2)), TypeError, "rank 1: softcap must be"),
}


def odd_rank(rank, ranks, device, in_store):
    """All errors in one go, after a good call: the group stays usable."""
    q, k, v = torch.randn(3, 1, 4, 20, 16, device=device)
    if in_store:
        _peers.opened = lambda *address: None  # as on several nodes
    expected = [ring.forward(q, k, v, timeout=20) for _ in range(2)]
    errors = {}
    for name, (change, options, *_) in ODD.items():
        arguments, here = ((q, k, v), {}) if rank != 1 else (change(q.clone(), k, v), options)
        try:
            ring.forward(*arguments, **{"timeout": 20, **here})
        except Exception as error:
            errors[name] = type(error), str(error)
    assert all(torch.equal(ring.forward(q, k, v, timeout=20), o) for o in expected)
    return errors


@pytest.mark.parametrize("in_store", [False, True], ids=["one node", "several nodes"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_odd_ranks(ranks, transport, in_store):
    needs_gpus(transport, ranks)
    results = run(odd_rank, ranks, in_store, transport=transport)
    raise_first(results)
    assert all(result == results[0] for result in results)
    for name, (*_, kind, text) in ODD.items():
        was, said = results[0][name]
        assert was is kind and "\n" not in said, name
        with pytest.raises(kind, match=text):
            raise was(said)


def different_passes(rank, ranks, device):
    x = torch.randn(1, 1, 8, 16, requires_grad=True)
    loss = ring.forward(x, x, x, timeout=20).sum()
    with pytest.raises(ValueError, match="^call must be .* pass on rank 0 and ring.forward on rank 1$"):
        loss.backward() if rank == 0 else ring.forward(x, x, x, timeout=20)
    ring.forward(x, x, x, timeout=20).sum().backward()


def test_different_passes():
    raise_first(run(different_passes, 2))


# ------------------------------------------------------------------------------------ lost ranks


def end_here(how):
    os.kill(os.getpid(), how)
    time.sleep(LIMIT)  # another thread may take the signal: this one would go on for a while


def lose_a_rank(rank, ranks, device, lost, when, how, timeout, within="forward"):
    """The error of a call in which a rank is lost before the call, or within its `when`th product."""
    q, k, v = torch.randn(3, 1, 2, 40, 16, device=device).requires_grad_(within == "backward")
    o = ring.forward(q, k, v, timeout=20 if within == "forward" else timeout)
    calls = []
    plain = getattr(_ring_passes, f"{within}_into")

    def last(*arguments, **options):
        calls.append(0)
        if len(calls) == when:
            if how == "raises":
                raise MemoryError("there is none")
            end_here(how)
        return plain(*arguments, **options)

    if rank == lost:
        setattr(_ring_passes, f"{within}_into", last)
        if when == 0:
            end_here(how)
    start = time.monotonic()
    try:
        ring.forward(q, k, v, timeout=timeout) if within == "forward" else o.sum().backward()
    except (ring.RingError, MemoryError) as error:
        return type(error), str(error), time.monotonic() - start


def names_rank(text, lost):
    """A rank may not know which of its two neighbours is gone: "rank 2 or 0"."""
    return re.search(rf"\b(rank|or) {lost}\b", text)


@pytest.mark.parametrize(
    "how, lost, when",
    [
        (signal.SIGKILL, 1, 1),
        (signal.SIGKILL, 0, 2),
        (signal.SIGKILL, 2, 0),
        (signal.SIGSTOP, 1, 1),
        (signal.SIGSTOP, 0, 2),
        (signal.SIGSTOP, 3, 0),
    ],
)
def test_lost_rank(how, lost, when):
    """The others raise one error, within the time that was set. Who has all keys already may return."""
    results = run(lose_a_rank, 4, lost, when, how, TIMEOUT, gone=[lost])
    others = [result for result in results if result is not None]
    assert others, "no rank raised"
    kinds, texts, seconds = zip(*others, strict=True)
    assert set(kinds) == {ring.RingError} and len(set(texts)) == 1, texts
    assert names_rank(texts[0], lost) and "\n" not in texts[0]
    assert max(seconds) < TIMEOUT + 4
    if when < 2:
        assert len(others) == 3
    if how == signal.SIGSTOP:
        assert f"{TIMEOUT:g} s" in texts[0]


@pytest.mark.parametrize("how, when", [(signal.SIGKILL, 2), (signal.SIGSTOP, 0)])
def test_lost_rank_of_the_backward_pass(how, when):
    results = run(lose_a_rank, 3, 1, when, how, TIMEOUT, "backward", gone=[1])
    kinds, texts, seconds = zip(*(result for result in results if result is not None), strict=True)
    assert set(kinds) == {ring.RingError} and len(set(texts)) == 1, texts
    assert texts[0].startswith(f"{BACKWARD} ended on all ranks") and names_rank(texts[0], 1)
    assert max(seconds) < TIMEOUT + 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
@pytest.mark.parametrize("within", ["forward", "backward"])
@pytest.mark.parametrize(
    "how, lost, when",
    [(signal.SIGKILL, 1, 1), (signal.SIGKILL, 0, 0), (signal.SIGSTOP, 1, 1), (signal.SIGSTOP, 1, 0)],
)
def test_lost_rank_on_gpus(how, lost, when, within):
    """The other one raises an error in time."""
    results = run(lose_a_rank, 2, lost, when, how, TIMEOUT, within, transport="nccl", gone=[lost])
    kind, text, seconds = results[1 - lost]
    assert kind is ring.RingError and names_rank(text, lost) and "\n" not in text
    assert seconds < TIMEOUT + 5


@pytest.mark.parametrize("ranks, lost", [(2, 1), (4, 2)])
@pytest.mark.parametrize("within, name", [("forward", "ring.forward"), ("backward", BACKWARD)])
def test_rank_that_raises(ranks, lost, within, name):
    """It raises its own error, and the others name it at once, long before the timeout."""
    results = run(lose_a_rank, ranks, lost, 1, "raises", 1000, within)
    assert results.pop(lost)[:2] == (MemoryError, "there is none")
    if ranks == 2 and within == "forward":  # the other one may have all keys by then
        results = [result for result in results if result]
    for kind, text, seconds in results:
        assert (kind, text) == (
            ring.RingError,
            f"{name} ended on all ranks: rank {lost} raised MemoryError: there is none",
        )
        assert seconds < 10


def test_host_of_the_store_stops():
    """Then the store answers nobody, and its own limits don't hold."""
    results = run(lose_a_rank, 3, 0, 0, signal.SIGSTOP, TIMEOUT, gone=[0], host=0)
    for kind, text, seconds in results[1:]:
        assert kind is ring.RingError and "store (most often rank 0 is its host)" in text
        assert seconds < TIMEOUT + 5


def fail_twice(rank, ranks, device):
    x = torch.randn(1, 1, 8, 16)
    if rank == 2:
        time.sleep(20)
    errors = []
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(ring.RingError) as error:
            ring.forward(x, x, x, timeout=1)
        errors.append((str(error.value), time.monotonic() - start))
    return errors


def test_group_stays_broken():
    """Later calls raise the first failure, and don't wait for the timeout."""
    for (first, _), (second, seconds) in run(fail_twice, 3, gone=[2])[:2]:
        assert first == second and "s for rank 2 to call ring.forward" in first
        assert seconds < 1
