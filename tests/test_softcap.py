"""softcap: scores become softcap * tanh(score / softcap). Values and gradients against float64."""

import pytest
import torch
from conftest import SHAPES_OF_MASKS, check_o
from reference import attention, gradients, relative_error
from test_backward import check, forms
from test_cu_seqlens import DOCUMENTS, captured_without_synchronising, drawn, same_bits
from test_key_ranges import RANGES
from test_prefix_k import MASKS

import minimal_attn
from minimal_attn import flash_attn, second_order

SHAPES = [  # B, Hq, Hkv, Nq, Nk, d
    *SHAPES_OF_MASKS,
    (2, 2, 2, 150, 140, 96),
    (1, 2, 1, 130, 270, 192),
    (3, 6, 1, 1, 400, 80),
    (2, 8, 2, 2, 3000, 128),
    (1, 4, 1, 1, 700, 256),
    (1, 2, 1, 200, 500, 64),  # tiles of keys that are neither the first nor cut
    (1, 2, 1, 130, 400, 256),
]


def kernel_reached(backend, q, k, v, **options):
    """Where scores change, a GPU's kernel is general, or decode."""
    if backend.name in ("hopper", "portable"):
        for backward in False, True:
            kernel = backend.explain(q, k, v, backward=backward, **options).kernel
            assert "general" in kernel or (not backward and kernel.startswith("decode"))


def check_general(backend, q, k, v, forms=(None,), **options):
    """Values, and gradients in each form of the kernels, which are those that change scores."""
    kernel_reached(backend, q, k, v, **options)
    backend.check(q, k, v, **options)
    for _ in forms:
        check(backend, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("softcap", [50.0, 2.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(backend, dtype, shape, softcap):
    B, Hq, Hkv, Nq, Nk, d = shape
    q, k, v = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype)
    for options in dict(causal=True), dict(softmax_scale=-1.5 / d**0.5), dict(window_size=(40, 7)):
        options["softcap"] = softcap
        check_general(backend, q, k, v, forms=forms(backend, dtype), **options)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(backend, dtype, mask):
    q, k, v = backend.qkv(dtype=dtype)
    options = MASKS[mask](backend, 2, 90) | dict(softcap=1.5, prefix_k=backend.ints(4, 30))
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("make", DOCUMENTS)
def test_documents(backend, dtype, make):
    qkv, options = drawn(backend, make, dtype, front=3, behind=4)
    options |= dict(softcap=3.0, causal=True)
    check_general(backend, *qkv, **options)


@pytest.mark.parametrize("make", RANGES)
def test_key_ranges(backend, dtype, make):
    q, k, v = backend.qkv(dtype=dtype, Nq=200, Nk=180)
    options = dict(softcap=3.0, key_ranges=make(backend, 2, 200, 180).to(backend.device))
    backend.check(q, k, v, **options)
    for _ in forms(backend, dtype):
        check(backend, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("scale, softcap", [(3, 50), (10, 30), (40, 1000), (1e-3, 1e-3), (100, 1e5)])
def test_large_scores(backend, dtype, d, scale, softcap):
    """Where tanh is far from linear, near its ends, and where scores are large in spite of it."""
    q, k, v = backend.qkv(Nq=130, Nk=150, d=d, dtype=dtype)
    options = dict(softcap=softcap, softmax_scale=scale * d**-0.5, causal=True)
    expected = minimal_attn.forward(*(x.cpu() for x in (q, k, v)), backend="cpu", **options).double()
    actual = backend.forward(q, k, v, **options).double().cpu()
    exact = attention(*(x.cpu() for x in (q, k, v)), **options).o
    bound = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}[dtype] * max(1, softcap / 100)
    assert relative_error(expected, exact) < bound
    assert relative_error(actual, exact) < bound


def check_states_and_sinks(backend, q, k, v, **options):
    """Keys in two chunks, of 90 causal ones; sinks; a gradient of the log-sum-exp."""
    state = backend.forward(q, k, v, return_state=True, **options)
    first = backend.forward(q, k[:, :, :50], v[:, :, :50], offset=20, return_state=True, **options)
    joined = backend.forward(q, k[:, :, 50:], v[:, :, 50:], offset=-30, state=first, **options)
    for x, y in zip(joined, state, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 if q.dtype == torch.float32 else 2e-2)
    backend.check(q, k, v, sinks=backend.randn(4), **options)
    check(backend, torch.randn_like(q), q, k, v, sinks=backend.randn(4), **options)
    check(backend, torch.randn_like(q), q, k, v, dlse=backend.randn(2, 4, 70), **options)


def check_decode(backend, q, k, v, **options):
    """Of 3 x 320 keys, by a kernel for few queries: as they are, and in pages of any order."""
    table = torch.randperm(60, generator=backend.generator).view(3, 20).to(backend.device, torch.int32)
    pages = []
    for x in k, v:
        page = x.new_full((60, 2, 16, 128), torch.nan)
        page[table.long()] = x.unflatten(2, (20, 16)).transpose(1, 2)
        pages.append(page)
    kernel = backend.explain(q, *pages, block_table=table, **options).kernel
    assert backend.name in ("cpu", "paper") or kernel.startswith("decode")
    expected = backend.forward(q, k, v, **options)
    torch.testing.assert_close(backend.forward(q, *pages, block_table=table, **options), expected)
    backend.check(q, k, v, **options)


def test_forms_of_results(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    options = dict(causal=True, softcap=2.0)
    o, lse = backend.forward(q, k, v, return_lse=True, **options)
    state = backend.forward(q, k, v, return_state=True, **options)
    torch.testing.assert_close(state[2] + state[1].log(), lse)
    assert (state[2] <= 2.0).all()
    check_states_and_sinks(backend, q, k, v, **options)


def test_paged_decode(backend, dtype):
    """Pages in any order, lengths that only the device knows."""
    q, k, v = backend.qkv(B=3, Hq=8, Hkv=2, Nq=1, Nk=16 * 20, d=128, dtype=dtype)
    check_decode(backend, q, k, v, softcap=1.0, seqlens_k=backend.ints(320, 130, 200), causal=True)


def test_hidden_nan(backend, dtype):
    """Of keys that don't count, of another document, and behind all documents."""
    q, k, v = backend.qkv(B=1, Nq=200, Nk=200, dtype=dtype)
    cu = backend.ints(0, 100, 180)
    options = dict(softcap=2.0, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    expected = backend.forward(q, k, v, **options)
    for x in q, k, v:
        x[:, :, 180:] = torch.nan
    found = backend.forward(q, k, v, **options)
    # Beside a NaN float32 leaves AMX, where a CPU has it, and is rounded otherwise.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if backend.name == "cpu" else 0)
    v[:, :, 50] = torch.nan
    k[:, :, 60] = torch.inf
    actual = backend.forward(q, k, v, **options)[:, :, 100:]
    torch.testing.assert_close(actual, expected[:, :, 100:], rtol=1e-2, atol=1e-2)


def test_gradients_of_hidden_nan(backend, dtype):
    """Of keys that the band alone hides from all queries."""
    q, k, v = backend.qkv(Nq=70, Nk=150, dtype=dtype)
    options = dict(softcap=2.0, causal=True, offset=20)
    state = backend.forward(q, k, v, **options, return_state=True)
    k[:, :, 100], v[:, :, 110] = torch.nan, torch.inf
    do = torch.randn_like(q)
    _, dk, dv = minimal_attn.backward(do, q, k, v, *state, **options, backend=backend.name)
    assert not dk[:, :, 90:].any() and not dv[:, :, 90:].any()
    assert dk[:, :, :90].any() and dv[:, :, :90].isfinite().all()


def test_none_and_0_are_no_softcap(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    expected = backend.forward(q, k, v, causal=True)
    assert torch.equal(backend.forward(q, k, v, causal=True, softcap=0), expected)
    assert torch.equal(backend.forward(q, k, v, causal=True, softcap=0.0), expected)
    # Without any softcap to speak of, the values are the same but for rounding.
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        backend.forward(q, k, v, causal=True, softcap=1e30), expected, rtol=bound, atol=bound
    )


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e31, 1e-31])
def test_wrong_values(backend, wrong):
    q, k, v = backend.qkv()
    with pytest.raises(ValueError, match=r"^softcap must be None, 0 .* to 1e30, but was ") as error:
        backend.forward(q, k, v, softcap=wrong)
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="^softcap must be a number or None"):
        backend.forward(q, k, v, softcap="50")


def test_same_bits(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype, Nq=200)
    options = dict(softcap=2.0, causal=True)
    first = backend.forward(q, k, v, **options)
    assert all(torch.equal(backend.forward(q, k, v, **options), first) for _ in range(30))
    alone = backend.forward(q[:1], k[:1], v[:1], **options)
    assert torch.equal(alone, first[:1])


def test_rows_do_not_depend_on_other_rows(backend, dtype):
    """Tiles whose scores are all near 0 take a shorter tanh: a large row beside others leaves their bits."""
    q, k, v = backend.qkv(2, 4, 2, 100, 90, 64, dtype=dtype)
    large, others = q.clone(), torch.arange(100) != 37
    large[:, :, 37] *= 100
    o, beside_large = (backend.forward(x, k, v, softcap=20.0)[:, :, others] for x in (q, large))
    if backend.device.type == "cpu":
        assert o.equal(beside_large)
    else:
        torch.testing.assert_close(o, beside_large, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graph(cuda_backend, dtype):
    """Nothing synchronises; a replay reads lengths anew."""
    inputs = [x.requires_grad_() for x in cuda_backend.qkv(dtype=dtype)]
    lengths, do = cuda_backend.ints(90, 50), torch.randn_like(inputs[0])

    def step():
        o = cuda_backend.forward(*inputs, softcap=2.0, causal=True, seqlens_k=lengths)
        return o.detach(), *torch.autograd.grad(o, inputs, do)

    graph, captured = captured_without_synchronising(step)
    for values in [90, 50], [3, 0]:
        lengths.copy_(torch.tensor(values))
        graph.replay()
        assert same_bits(captured, step())


def test_second_derivatives(backend):
    q, k, v = (x.double().cpu().requires_grad_() for x in backend.qkv(B=1, Hq=2, Nq=3, Nk=4, d=2))
    torch.autograd.gradgradcheck(lambda *t: second_order.forward(*t, softcap=0.7, causal=True), (q, k, v))
    if backend.name == "cpu":
        x, y, z = (t.detach().float().requires_grad_() for t in (q, k, v))
        o = second_order.forward(x, y, z, softcap=0.7)
        torch.testing.assert_close(o, minimal_attn.forward(x, y, z, softcap=0.7))


def test_compiled(backend):
    q, k, v = backend.qkv()

    @torch.compile(fullgraph=True, backend="eager")
    def call(q, k, v):
        return backend.forward(q, k, v, softcap=1.5, causal=True)

    assert torch.equal(call(q, k, v), backend.forward(q, k, v, softcap=1.5, causal=True))


@pytest.mark.sanitizer
@pytest.mark.parametrize("d", [64, 128, 256])
def test_sanitizer(backend, dtype, d):
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=130, Nk=140, d=d, dtype=dtype)
    check(backend, torch.randn_like(q), q, k, v, softcap=2.0, causal=True)
    backend.check(q[:, :, :1], k, v, softcap=2.0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn(forced_backend, dtype, deterministic):
    """Its three functions pass softcap on, in both passes. Values below 0 are none, as there."""
    b = forced_backend
    q, k, v = (x.transpose(1, 2) for x in b.qkv(B=2, Nq=30, Nk=40, dtype=dtype))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    options = dict(causal=True, softcap=1.5, deterministic=deterministic)
    exact, do = attention(*heads, causal=True, softcap=1.5), torch.randn_like(q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = flash_attn.flash_attn_func(*leaves, **options)
    check_o(o.detach().transpose(1, 2), exact, dtype)
    found = torch.autograd.grad(o, leaves, do)
    expected = gradients(do.transpose(1, 2), *heads, causal=True, softcap=1.5)
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x.transpose(1, 2).double(), y) < 2e-2
    packed = [x.flatten(0, 1).clone().requires_grad_() for x in (q, k, v)]
    bounds = b.ints(0, 30, 60), b.ints(0, 40, 80), 30, 40
    o = flash_attn.flash_attn_varlen_func(*packed, *bounds, **options)
    check_o(o.detach().view_as(q).transpose(1, 2), exact, dtype)
    for x, y in zip(torch.autograd.grad(o, packed, do.flatten(0, 1)), expected, strict=True):
        assert relative_error(x.view(2, -1, *x.shape[1:]).transpose(1, 2).double(), y) < 2e-2
    table = b.ints(3, 1, 0, 2).view(2, 2)
    pages = [torch.full((4, 20, 2, 64), torch.nan, dtype=dtype, device=b.device) for _ in "kv"]
    for page, x in zip(pages, (k, v), strict=True):
        page[table.long()] = x.unflatten(1, (2, 20))
    o = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), *pages, *bounds, causal=True, softcap=1.5, block_table=table
    )
    check_o(o.view_as(q).transpose(1, 2), exact, dtype)
    o = flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), causal=True, softcap=1.5)
    check_o(o.transpose(1, 2), exact, dtype)
    none = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True, softcap=-3.0), none)


def test_pages_that_are_copied(backend, dtype):
    """explain names what runs: pages of 24 keys are copied first, and then decode reads no pages."""
    q, k, v = backend.qkv(B=2, Hq=4, Hkv=2, Nq=1, Nk=240, dtype=dtype)
    table = torch.randperm(20, generator=backend.generator).view(2, 10).to(backend.device, torch.int32)
    pages = [x.new_zeros(20, 2, 24, 64) for x in (k, v)]
    for page, x in zip(pages, (k, v), strict=True):
        page[table.long()] = x.unflatten(2, (10, 24)).transpose(1, 2)
    explained = backend.explain(q, *pages, block_table=table, softcap=2.0)
    assert "general" not in explained.kernel
    o = backend.forward(q, *pages, block_table=table, softcap=2.0)
    check_o(o, attention(q, k, v, softcap=2.0), dtype)


def test_padding_may_be_nan(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    options = dict(softcap=2.0, seqlens_k=backend.ints(80, 40), leftpad_k=backend.ints(3, 10))
    expected = backend.forward(q, k, v, **options)
    for x in k, v:
        x[0, :, :3], x[0, :, 80:], x[1, :, :10], x[1, :, 40:] = [torch.nan] * 4
    assert torch.equal(backend.forward(q, k, v, **options), expected)
    check(backend, torch.randn_like(q), q, k, v, **options)


def test_infinite_products(backend):
    """They become the scores softcap and -softcap."""
    q, k, v = backend.qkv(dtype=torch.float32)
    k[:, :, 5, 0] = torch.inf
    backend.check(q, k, v, softcap=2.0)


def test_large_softcaps_in_bfloat16(cuda_backend):
    """Hopper's kernels approximate tanh: above 128 they leave the call to portable's."""
    q, k, v = cuda_backend.qkv(Nq=200, Nk=300, d=128, dtype=torch.bfloat16)
    own, passed_on = (cuda_backend.explain(q, k, v, softcap=x) for x in (128.0, 129.0))
    of_portable = minimal_attn.explain(q, k, v, softcap=129.0, backend="portable")
    if cuda_backend.name == "hopper":
        assert own.threads != of_portable.threads and passed_on.threads == of_portable.threads


def test_softcaps_beyond_all_scores(backend):
    """softmax_scale / softcap isn't a normal float32: there is no cap that a score could reach."""
    q = torch.full((1, 1, 1, 1), 1e10, device=backend.device)
    k = torch.tensor([1e10, 0], device=backend.device).view(1, 1, 2, 1)
    for softcap in 1e20, 1e25, 1e30:
        options = dict(softmax_scale=1e-20, softcap=softcap)
        o = backend.forward(q, k, k.clamp(max=1), **options)
        torch.testing.assert_close(o, torch.full_like(o, 0.7310586))
