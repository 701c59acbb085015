"""Tiny cases for compute-sanitizer (`pytest -m sanitizer`).

They reach every code path of the kernels, except that hopper flushes l and O only after thousands of keys.
test_explain.py says which shape reaches which tile. A block of half.cu (hopper) has one work tile here, since
racecheck reports what orders a second one (docs/ptxas.md). The reference runs on the CPU, so that a GPU sees
little but the kernels themselves.
"""

import pytest
import torch
from conftest import check_l_m, check_lse, check_o
from reference import attention, gradients, relative_error

import minimal_attn

pytestmark = pytest.mark.sanitizer


def check(backend, tensors, **options):
    def on_cpu(option):
        return option.cpu() if isinstance(option, torch.Tensor) else option

    expected = attention(*map(on_cpu, tensors), **{name: on_cpu(option) for name, option in options.items()})
    o = backend.forward(*tensors, **options)
    check_o(o.cpu(), expected, o.dtype)
    _, lse = backend.forward(*tensors, **options, return_lse=True)
    check_lse(lse.cpu(), expected)
    o, l, m = (t.cpu() for t in backend.forward(*tensors, **options, return_state=True))
    check_o(o, expected, tensors[0].dtype)
    check_l_m(l, m, expected)


@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("Nq, Nk", [(1, 1), (65, 65), (1, 200), (20, 65), (40, 65), (150, 65), (200, 65)])
def test_shapes(backend, dtype, d, Nq, Nk):
    check(backend, backend.qkv(B=1, Hq=2, Hkv=1, Nq=Nq, Nk=Nk, d=d, dtype=dtype))


def test_strides_of_size_1(backend, dtype):
    """The stride of a dimension of size 1 may be any number."""
    tensors = backend.qkv(B=1, Hq=1, Hkv=1, Nq=65, Nk=65, d=32, dtype=dtype)
    check(backend, [t.as_strided(t.shape, (2**62, 2**62, 32, 1)) for t in tensors])


@pytest.mark.parametrize("kilobytes", [64, 99, 163])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_smaller_shared_memory(cuda_backend, shared_memory_limit, dtype, d, kilobytes):
    shared_memory_limit(1024 * kilobytes)
    for Nq in 20, 65:
        check(cuda_backend, cuda_backend.qkv(B=1, Hq=1, Hkv=1, Nq=Nq, Nk=70, d=d, dtype=dtype), causal=True)


@pytest.mark.parametrize("d", [1, 5, 33, 72, 100, 129, 250])
def test_head_dimensions_between(backend, dtype, d):
    check(backend, backend.qkv(B=1, Hq=1, Hkv=1, Nq=65, Nk=70, d=d, dtype=dtype), causal=True)


@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("by", [1, 2, 4])
def test_unaligned(backend, dtype, d, by):
    """Neither the first element nor a row begins at a multiple of 16 bytes."""
    tensors = backend.qkv(B=1, Hq=1, Hkv=1, Nq=65, Nk=70, d=d + by, dtype=dtype)
    check(backend, [t[..., by:] for t in tensors], causal=True)


@pytest.mark.parametrize(
    "band",
    [
        {"causal": True},
        {"window_size": (10, 5)},
        {"causal": True, "offset": -40},
        {"window_size": (-1, 70), "offset": 30},
    ],
    ids=str,
)
@pytest.mark.parametrize("d", [64, 128])
def test_masks(backend, dtype, d, band):
    tensors = backend.qkv(B=3, Hq=2, Hkv=1, Nq=65, Nk=200, d=d, dtype=dtype)
    check(backend, tensors, **band)
    limits = {"seqlens_k": backend.ints(200, 70, 0), "leftpad_k": backend.ints(100, 64, 0)}
    check(backend, tensors, **band, **limits)
    check(backend, tensors, **{**band, **limits, "offset": backend.ints(100, 0, -5)})


@pytest.mark.parametrize("Nq", [1, 3, 65])
@pytest.mark.parametrize("d", [37, 64, 128])
def test_pages(backend, dtype, d, Nq):
    q, (k, v) = backend.randn(2, 4, Nq, d, dtype=dtype), backend.randn(2, 5, 2, 16, d, dtype=dtype)
    limits = {"causal": True, "seqlens_k": backend.ints(70, 16), "leftpad_k": backend.ints(20, 0)}
    table = torch.tensor([[-1, 3, 0, 3, 4, 9], [2, 10**9, -1, -(10**9), 5, 5]])
    paged = backend.forward(q, k, v, block_table=table.int().to(backend.device), **limits).cpu()
    k, v = (t.cpu()[table.clamp(0, 4)].transpose(1, 2).flatten(2, 3) for t in (k, v))
    limits = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in limits.items()}
    check_o(paged, attention(q.cpu(), k, v, **limits), dtype)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_far_from_zero(backend, dtype, d):
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=200, Nk=400, d=d, dtype=dtype)
    k[:, :, 250] = 0
    k[:, :, 250, 0] = 1e4
    check(backend, (q, k, v), causal=True)


def beyond_float16(tensors):
    q, k, v = tensors
    v[0, :, 30] *= 1e12
    k[0, :, 20, 3] *= 1e9
    q[..., 3] *= 1e-9
    return q, k, v


@pytest.mark.parametrize("Nq", [60, 100])
@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_float32_beyond_float16(backend, d, Nq):
    check(backend, beyond_float16(backend.qkv(B=1, Hq=1, Hkv=1, Nq=Nq, Nk=60, d=d)), causal=True)


@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_several_work_tiles_beyond_float16(backend, d):
    check(backend, beyond_float16(backend.qkv(B=2, Hq=140, Hkv=2, Nq=70, Nk=60, d=d)), causal=True)


@pytest.mark.parametrize("d", [40, 128, 256])
def test_documents(backend, dtype, d):
    """Also without queries, and without keys."""
    tensors = backend.qkv(B=1, Hq=2, Hkv=1, Nq=280, Nk=200, d=d, dtype=dtype)
    ends = backend.ints(5, 60, 60, 200, 270), backend.ints(3, 50, 120, 120, 190)
    options = dict(causal=True, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
    check(backend, tensors, **options)
    if dtype == torch.float32:
        check(backend, beyond_float16(tensors), **options)


@pytest.mark.parametrize("d, Hq, Nq", [(64, 132, 200), (128, 70, 150)])
def test_many_heads_of_float32(backend, d, Hq, Nq):
    """hopper has larger tiles for these: 256 queries at d 64, 192 at d 128."""
    tensors = backend.qkv(B=1, Hq=Hq, Hkv=2, Nq=Nq, Nk=140, d=d)
    if backend.name == "hopper" and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert backend.explain(*tensors).Br == {64: 256, 128: 192}[d]
    check(backend, tensors, causal=True)
    check(backend, beyond_float16(tensors), causal=True)


@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_state(backend, dtype, d):
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=65, Nk=200, d=d, dtype=dtype)
    expected = attention(q.cpu(), k.cpu(), v.cpu(), causal=True)
    state = backend.forward(q, k[:, :, :150], v[:, :, :150], causal=True, offset=135, return_state=True)
    o, l, m = backend.forward(q, k[:, :, 150:], v[:, :, 150:], causal=True, offset=-15, state=state)
    check_o(o.cpu(), expected, dtype)
    check_l_m(l.cpu(), m.cpu(), expected)


@pytest.mark.parametrize("d", [1, 64, 90, 128, 180, 256])
@pytest.mark.parametrize("Nq, Nk", [(1, 1), (70, 130)])
def test_backward(backend, dtype, d, Nq, Nk):
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=Nq, Nk=Nk, d=d, dtype=dtype)
    options = dict(causal=True, seqlens_k=backend.ints(Nk - Nk // 9))
    o, lse = backend.forward(q, k, v, return_lse=True, **options)
    on_cpu = options | dict(seqlens_k=options["seqlens_k"].cpu())
    exact = gradients(q.cpu(), q.cpu(), k.cpu(), v.cpu(), **on_cpu)
    wanted = slice(2 if Nk == 1 else 0, 3)  # dq and dk of a single key are 0 but for rounding
    bound = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    bound *= 1.5 if d == 1 else 1  # few numbers: SDPA's dq was off by up to 2.5e-2 in bfloat16 (600 draws)
    for is_deterministic in [True, False] if backend.name == "hopper" else [True]:
        torch.use_deterministic_algorithms(is_deterministic)
        actual = minimal_attn.backward(q, q, k, v, o, lse, None, backend=backend.name, **options)
        for x, y in zip(actual[wanted], exact[wanted], strict=True):
            # of d 1 and one key dv is the sum of two numbers of half types, which may be 0
            assert relative_error(x.double().cpu(), y) < bound if y.any() else not x.any()


@pytest.mark.parametrize("d", [37, 64, 128, 256])
def test_backward_with_key_ranges(backend, dtype, d):
    """Of any ints: nothing is read outside the tensors."""
    q, k, v = backend.qkv(Nq=150, Nk=200, d=d, dtype=dtype)
    ranges = backend.integers(-9, 209, 2, 150, 2, dtype=torch.int32)
    ranges[:, ::7] = backend.integers(-(2**31), 2**31 - 1, 2, 22, 2, dtype=torch.int32)
    check(backend, (q, k, v), key_ranges=ranges)
    o, lse = backend.forward(q, k, v, return_lse=True, key_ranges=ranges)
    exact = gradients(*(t.cpu() for t in (q, q, k, v)), key_ranges=ranges.cpu())
    actual = minimal_attn.backward(q, q, k, v, o, lse, None, backend=backend.name, key_ranges=ranges)
    for x, y in zip(actual, exact, strict=True):
        assert relative_error(x.double().cpu(), y) < {torch.float32: 5e-6}.get(dtype, 2e-2)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("Hq, Hkv", [(8, 1), (2, 2)])
def test_backward_with_split_keys(backend, dtype, d, Hq, Hkv):
    """By hopper: few tiles of keys, so blocks take slices of them."""
    if backend.name != "hopper" or dtype == torch.float32:
        pytest.skip("a kernel of hopper")
    q, k, v = backend.qkv(B=1, Hq=Hq, Hkv=Hkv, Nq=70 if Hq == 8 else 500, Nk=130, d=d, dtype=dtype)
    o, lse = backend.forward(q, k, v, return_lse=True)
    exact = gradients(*(t.cpu() for t in (q, q, k, v)))
    for is_deterministic in [True, False]:
        torch.use_deterministic_algorithms(is_deterministic)
        if torch.cuda.get_device_properties(0).multi_processor_count >= 60:
            is_split = backend.explain(q, k, v, backward=True).kernel.endswith("keys split")
            assert is_split == (Hq > Hkv or (d <= 128 and not is_deterministic))
        actual = minimal_attn.backward(q, q, k, v, o, lse, None, backend="hopper")
        for x, y in zip(actual, exact, strict=True):
            assert relative_error(x.double().cpu(), y) < 2e-2
