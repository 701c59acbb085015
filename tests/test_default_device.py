"""torch.set_default_device says where a user's new tensors are, not where these functions have theirs.

With "meta" a tensor that is made without a device shows on a CPU: it has no data.
"""

import pytest
import torch
import torch.distributed as dist
from test_flash_attn import CALLS, one_call_of_each

import minimal_attn
from minimal_attn import flash_attn, ring


def in_order(results):
    """Tensors, and what else is compared, out of tuples of tuples."""
    if isinstance(results, tuple):
        return [x for some in results for x in in_order(some)]
    return [results]


def check(call):
    expected = in_order(call())
    torch.set_default_device("meta")
    try:
        results = in_order(call())
    finally:
        torch.set_default_device(None)
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def with_gradients(function, *tensors, **options):
    inputs = [t.detach().requires_grad_() for t in tensors]
    out = function(*inputs, **options)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("name", ["forward", "paged", "explain", "merge", "drop-in", "activate", "vmap"])
def test_forward(backend, name):
    q, k, v = backend.qkv(Nq=90)
    pages, table = backend.randn(2, 6, 2, 16, 64), backend.integers(0, 5, 2, 3, dtype=torch.int32)
    lengths, queries = backend.ints(40, 3), torch.stack([q, q * 0.5])

    def mapped(q, k):
        return backend.forward(q, k, k, block_table=table)

    def activated(q, k, v):
        with minimal_attn.activate():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    options = dict(causal=True, seqlens_k=lengths, leftpad_k=backend.ints(2, 0), offset=lengths)
    calls = {
        "forward": lambda: (
            with_gradients(backend.forward, q, k, v, **options),
            backend.forward(q, k, v, state=backend.forward(q, k, v, return_state=True)),
        ),
        "paged": lambda: backend.forward(q, *pages, block_table=table, seqlens_k=lengths),
        "explain": lambda: str(backend.explain(q, k, v, backward=True)),
        "merge": lambda: minimal_attn.merge(*[backend.forward(q, k, v, return_state=True)] * 2),
        "drop-in": lambda: (
            minimal_attn.scaled_dot_product_attention(q, k, v, enable_gqa=True).isfinite().all()
        ),
        "activate": lambda: with_gradients(activated, q, q, q),
        "vmap": lambda: torch.vmap(mapped)(queries, pages),
    }
    check(calls[name])


@pytest.mark.parametrize("name", [*CALLS, "gradients", "kvcache of one length", "varlen of pages"])
def test_flash_attn(backend, name):
    q, k, v = (x.transpose(1, 2) for x in backend.qkv())
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    bounds = backend.ints(0, 70, 140), backend.ints(0, 90, 180), 70, 90
    pages = [x.unflatten(1, (9, 10)).flatten(0, 1) for x in (k, v)]
    table = torch.arange(18, device=q.device).view(2, 9)

    def varlen(*tensors):
        return flash_attn.flash_attn_varlen_func(*tensors, *bounds, causal=True)

    calls = one_call_of_each(backend) | {
        "gradients": lambda: (
            with_gradients(flash_attn.flash_attn_func, q, k, v, deterministic=True),
            with_gradients(varlen, *packed),
        ),
        "kvcache of one length": lambda: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=5),
        "varlen of pages": lambda: flash_attn.flash_attn_varlen_func(
            packed[0], *pages, *bounds, block_table=table
        ),
    }
    check(calls[name])


def test_wrong_lengths_are_still_found():
    q = torch.zeros(2, 5, 4, 8)
    torch.set_default_device("meta")
    try:
        with pytest.raises(ValueError, match="^cache_seqlens must be 0 to 5, but is 6"):
            flash_attn.flash_attn_with_kvcache(q, q, q, cache_seqlens=6)
    finally:
        torch.set_default_device(None)


def test_ring(tmp_path):
    tensors = [torch.randn(2, 4, 30, 64) for _ in "qkv"]
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        check(lambda: with_gradients(ring.forward, *tensors, causal=True))
    finally:
        dist.destroy_process_group()
