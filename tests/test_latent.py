"""Decoding of latent attention (DeepSeek's MLA): V is the first columns of K. Values against float64."""

import pytest
import torch
from conftest import check_o
from reference import attention

import minimal_attn
from minimal_attn import flash_attn

SHAPES = [  # B, Hq, Nq, Nk, d, d_v
    (2, 16, 1, 700, 576, 512),
    (3, 16, 1, 130, 576, 512),
    (1, 128, 1, 300, 576, 512),
    (1, 128, 2, 300, 576, 512),
    (2, 5, 3, 333, 576, 512),
    (1, 16, 1, 2500, 576, 512),
    (1, 8, 1, 200, 320, 256),
    (1, 8, 1, 200, 576, 64),
    (1, 24, 1, 200, 512, 512),
    (20, 16, 1, 257, 576, 512),
]


def drawn(backend, dtype, B, Hq, Nq, Nk, d, Hkv=1):
    return backend.randn(B, Hq, Nq, d, dtype=dtype), backend.randn(B, Hkv, Nk, d, dtype=dtype)


def reaches(backend, q, k, v, **options):
    """The kernel reads K once; without such a kernel the call is right all the same."""
    is_latent = backend.explain(q, k, v, **options).kernel == "decode, latent"
    if backend.name in ("hopper", "portable") and q.dtype != torch.float32:
        memory = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        assert is_latent == (memory >= 150 << 10)


OPTIONS = [{}, dict(causal=True), dict(window_size=(150, 0), softmax_scale=-0.1)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(backend, dtype, shape, options):
    B, Hq, Nq, Nk, d, d_v = shape
    q, k = drawn(backend, dtype, B, Hq, Nq, Nk, d)
    v = k[..., :d_v]
    reaches(backend, q, k, v, **options)
    backend.check(q, k, v, **options)


def test_lengths(backend, dtype):
    q, k = drawn(backend, dtype, 4, 16, 2, 900, 576)
    v = k[..., :512]
    end, begin = backend.ints(900, 0, 1, 517), backend.ints(3, 0, 0, 500)
    options = dict(seqlens_k=end, leftpad_k=begin, causal=True)
    j = torch.arange(900, device=k.device)[:, None]
    k.masked_fill_((j >= end[:, None, None, None]) | (j < begin[:, None, None, None]), torch.nan)
    reaches(backend, q, k, v, **options)
    backend.check(q, k, v, **options)


def test_two_key_heads_sinks_and_state(backend, dtype):
    q, k = drawn(backend, dtype, 2, 8, 1, 400, 576, Hkv=2)
    v = k[..., :512]
    reaches(backend, q, k, v)
    backend.check(q, k, v, sinks=backend.randn(8))
    state = backend.forward(q, k[:, :, :150], v[:, :, :150], return_state=True)
    o = backend.forward(q, k[:, :, 150:], v[:, :, 150:], state=state)[0]
    check_o(o, attention(q, k, v), dtype)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages(backend, dtype, page_size):
    """A latent cache in pages: (pages, 1, page_size, 576). What no batch reads is NaN."""
    lengths, n = [333, 1, 900], -(-900 // page_size)
    pages = backend.randn(3 * n + 2, 1, page_size, 576, dtype=dtype)
    order = backend.random.sample(range(3 * n + 2), 3 * n)
    table = torch.tensor(order, device=pages.device).view(3, n)
    k = pages[table].transpose(1, 2).flatten(2, 3)
    is_key = torch.arange(n * page_size, device=k.device) < torch.tensor(lengths, device=k.device)[:, None]
    hidden, at = ~is_key.view(3 * n, 1, page_size, 1), table.flatten()
    pages[at] = pages[at].masked_fill(hidden, torch.nan)
    q = backend.randn(3, 16, 1, 576, dtype=dtype)
    options = dict(block_table=table.int(), seqlens_k=backend.ints(*lengths))
    reaches(backend, q, pages, pages[..., :512], **options)
    o = backend.forward(q, pages, pages[..., :512], causal=True, **options)
    check_o(o, attention(q, k, k[..., :512], seqlens_k=options["seqlens_k"]), dtype)


def test_another_v_takes_another_kernel(backend, dtype):
    """V that isn't K's first columns, or not with K's strides."""
    q, k = drawn(backend, dtype, 1, 16, 1, 200, 512)
    for v in k.clone(), k[..., 8:], k.transpose(2, 3).contiguous().transpose(2, 3):
        assert backend.explain(q, k, v).kernel != "decode, latent"
        backend.check(q, k, v)


def test_same_bits(backend):
    q, k = drawn(backend, torch.bfloat16, 4, 16, 1, 3000, 576)
    first = backend.forward(q, k, k[..., :512])
    for _ in range(20):
        assert torch.equal(backend.forward(q, k, k[..., :512]), first)


def test_flash_attn_with_kvcache(backend, dtype):
    q, k = drawn(backend, dtype, 2, 16, 1, 300, 576)
    cache = k.transpose(1, 2)
    lengths = backend.ints(300, 123)
    o = flash_attn.flash_attn_with_kvcache(q.transpose(1, 2), cache, cache[..., :512], cache_seqlens=lengths)
    check_o(o.transpose(1, 2), attention(q, k, k[..., :512], seqlens_k=lengths), dtype)


def test_graph(backend):
    """One graph serves other lengths and values."""
    if backend.name == "cpu":
        pytest.skip("CUDA graphs")
    q, k = drawn(backend, torch.float16, 3, 16, 1, 500, 576)
    lengths = backend.ints(500, 77, 0)
    minimal_attn.forward(q, k, k[..., :512], seqlens_k=lengths, backend=backend.name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = minimal_attn.forward(q, k, k[..., :512], seqlens_k=lengths, backend=backend.name)
    for new in (1, 500, 300), (16, 64, 65):
        lengths.copy_(backend.ints(*new)), k.copy_(backend.randn(*k.shape)), q.copy_(backend.randn(*q.shape))
        graph.replay()
        check_o(o, attention(q, k, k[..., :512], seqlens_k=lengths), torch.float16)
