"""F.scaled_dot_product_attention by these kernels: the function of its signature, and activate()."""

import contextlib
import copy
import itertools
import subprocess
import sys
import threading

import pytest
import torch
from conftest import DTYPES, ERROR_BOUND
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal_attn

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::minimal_attn.FallbackWarning"
)
HAS_REGISTRY = hasattr(nn.attention, "restore_flash_attention_impl")


def check(actual, expected, dtype, factor=3.0):
    """`expected` is of float64; every row within what rounding explains, as far as values don't cancel."""
    assert actual.dtype == dtype and actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= factor * ERROR_BOUND[dtype], error


# ------------------------------------------------------------------------------------- the function

SHAPES = [  # query, key, value, enable_gqa: served
    ((2, 4, 50, 64), (2, 4, 70, 64), (2, 4, 70, 64), False),
    ((2, 4, 50, 24), (2, 2, 70, 24), (2, 2, 70, 24), True),
    ((2, 4, 50, 24), (2, 1, 70, 24), (2, 1, 70, 24), False),
    ((2, 4, 50, 24), (2, 1, 70, 24), (2, 4, 70, 24), False),
    ((2, 1, 50, 24), (2, 4, 70, 24), (2, 1, 70, 24), False),
    ((4, 4, 50, 24), (4, 4, 24), (4, 4, 24), False),  # 4 heads of 4 keys
    ((50, 16), (70, 16), (70, 16), False),
    ((50, 16), (3, 70, 16), (70, 16), False),
    ((3, 50, 16), (3, 70, 16), (3, 70, 16), False),
    ((6, 50, 16), (3, 70, 16), (3, 70, 16), True),
    ((4, 50, 16), (2, 4, 70, 16), (1, 4, 70, 16), False),
    ((2, 3, 4, 50, 16), (2, 3, 4, 70, 16), (2, 3, 4, 70, 16), False),
    ((2, 3, 4, 50, 16), (3, 2, 70, 16), (2, 1, 2, 70, 16), True),
    ((2, 1, 3, 4, 5, 16), (2, 1, 1, 9, 16), (2, 1, 1, 1, 9, 16), False),
    ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), False),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": -1}, {"scale": 0.3, "is_causal": True}], ids=str
)
@pytest.mark.parametrize("query, key, value, gqa", SHAPES, ids=str)
def test_served_shapes(randn, dtype, options, query, key, value, gqa):
    tensors = [randn(*shape, dtype=dtype) for shape in (query, key, value)]
    found = minimal_attn.explain_scaled_dot_product_attention(*tensors, enable_gqa=gqa, **options)
    assert isinstance(found, minimal_attn.Explanation)
    expected = F.scaled_dot_product_attention(*(t.double() for t in tensors), enable_gqa=gqa, **options)
    actual = minimal_attn.scaled_dot_product_attention(*tensors, enable_gqa=gqa, **options)
    check(actual, expected, dtype)


def passed_on(randn):
    q = randn(2, 4, 5, 8)
    wide = randn(2, 4, 5, 257)
    return [
        ("attn_mask is given", (q, q, q, randn(5, 5)), {}),
        ("dropout_p is not 0", (q, q, q), {"dropout_p": 0.3}),
        ("dtype", (q.double(),) * 3, {}),
        ("head dimension", (wide,) * 3, {}),
        ("head dimension", (q, q, randn(2, 4, 5, 9)), {}),
        (None, (q, q, randn(2, 4, 5, 9).requires_grad_()), {}),  # two reasons on a GPU
        ("empty", (q, q[:, :, :0], q[:, :, :0]), {}),
        ("empty", (q[:0],) * 3, {}),
        ("class", (q.as_subclass(type("Own", (torch.Tensor,), {})), q, q), {}),
    ]


@pytest.mark.parametrize("i", range(9))
def test_passed_on(randn, i):
    why, tensors, options = passed_on(randn)[i]
    found = minimal_attn.explain_scaled_dot_product_attention(*tensors, **options)
    assert isinstance(found, str) and found.startswith("PyTorch: ") and (why or "") in found
    torch.manual_seed(1)
    actual = minimal_attn.scaled_dot_product_attention(*tensors, **options)
    torch.manual_seed(1)
    assert torch.equal(actual, F.scaled_dot_product_attention(*tensors, **options))


@pytest.mark.parametrize(
    "shapes, options",
    [
        (((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)), {}),
        (((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)), {"enable_gqa": True}),
        (((1, 33), (2, 33), (2, 33)), {"enable_gqa": True}),
        (((2, 4, 5, 8), (3, 4, 5, 8), (3, 4, 5, 8)), {}),
        (((2, 4, 5, 8), (2, 4, 5, 9), (2, 4, 5, 9)), {}),
        (((8,), (5, 8), (5, 8)), {}),
    ],
    ids=str,
)
def test_pytorch_refuses_what_does_not_fit(randn, shapes, options):
    tensors = [randn(*shape) for shape in shapes]
    with pytest.raises((RuntimeError, ValueError, IndexError)) as expected:
        F.scaled_dot_product_attention(*tensors, **options)
    with pytest.raises(type(expected.value)):
        minimal_attn.scaled_dot_product_attention(*tensors, **options)


WRONG_TYPES = {"query": None, "scale": "1", "is_causal": 1, "enable_gqa": "a"}


@pytest.mark.parametrize("name, wrong", WRONG_TYPES.items(), ids=WRONG_TYPES.keys())
def test_pytorch_refuses_wrong_types(randn, name, wrong):
    arguments = dict.fromkeys(("query", "key", "value"), randn(2, 4, 5, 8)) | {name: wrong}
    for function in F.scaled_dot_product_attention, minimal_attn.scaled_dot_product_attention:
        with pytest.raises(TypeError, match=rf"scaled_dot_product_attention\(\): .*'{name}'"):
            function(**arguments)


def samples(device, dtype):
    """PyTorch's own samples of the function, with gradients and without."""
    pytest.importorskip("expecttest")  # PyTorch's tests need it
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    [op] = [op for op in invocations.op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    for requires_grad in False, True:
        yield from op.sample_inputs(device, dtype, requires_grad=requires_grad)


def gradients(function, sample, dtype=None):
    """o and the gradients of what requires them, after the same random numbers."""

    def copied(t):
        if not isinstance(t, torch.Tensor):
            return t
        to = dtype if t.is_floating_point() and dtype else t.dtype
        return t.detach().to(to).requires_grad_(t.requires_grad)

    tensors = [copied(t) for t in (sample.input, *sample.args)]
    options = {name: copied(t) for name, t in sample.kwargs.items()}
    torch.manual_seed(1)
    o = function(*tensors, **options)
    wanted = [t for t in (*tensors, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.manual_seed(2)
    weight = torch.randn(o.shape).to(o)
    return o, *(torch.autograd.grad(o, wanted, weight, allow_unused=True) if wanted else ())


def fused(q, k, v, **options):
    """PyTorch's function. 3 dimensions become 4: else it computes in separate steps, with more digits."""
    if not q.dim() == k.dim() == v.dim() == 3 or options.get("attn_mask") is not None:
        return F.scaled_dot_product_attention(q, k, v, **options)
    return F.scaled_dot_product_attention(*(t.unsqueeze(1) for t in (q, k, v)), **options).squeeze(1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("activated", [False, True])
def test_samples_of_pytorch(device, dtype, activated):
    """As PyTorch's function, within twice its error against float64 (and a little for rounding)."""
    served = 0
    function = F.scaled_dot_product_attention if activated else minimal_attn.scaled_dot_product_attention
    for sample in samples(device, dtype):
        has_dropout = sample.kwargs.get("dropout_p", 0) > 0
        is_same = has_dropout or dtype == torch.float64
        plain = gradients(F.scaled_dot_product_attention if is_same else fused, sample)
        exact = plain if has_dropout else gradients(F.scaled_dot_product_attention, sample, torch.float64)
        if activated:
            with minimal_attn.activate() as activation:
                actual = gradients(function, sample)
            served += activation.calls.get("minimal_attn", 0)
        else:
            actual = gradients(function, sample)
            options = dict(sample.kwargs)
            found = minimal_attn.explain_scaled_dot_product_attention(sample.input, *sample.args, **options)
            served += not isinstance(found, str)
        for x, pytorch, expected in zip(actual, plain, exact, strict=True):
            if x is None or pytorch is None:
                assert x is pytorch
                continue
            assert x.shape == pytorch.shape and x.dtype == pytorch.dtype == dtype
            if is_same:
                assert torch.equal(x, pytorch)
                continue
            # Gradients compute P again, from a rounded log-sum-exp, on CUDA in float32 with TF32 products.
            rounding = (8 if x is actual[0] else 32) * torch.finfo(dtype).eps
            bound = 2 * (pytorch.double() - expected).norm() + rounding * expected.norm()
            assert (x.double() - expected).norm() <= bound, sample
    assert (served > 0) == (dtype != torch.float64)


def test_compiled_function(randn):
    q, k, v = randn(2, 4, 50, 64), randn(2, 2, 70, 64), randn(2, 2, 70, 64)
    function = torch.compile(minimal_attn.scaled_dot_product_attention, fullgraph=True)
    actual = function(q, k, v, is_causal=True, enable_gqa=True)
    expected = minimal_attn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(actual, expected)


def test_compiled_with_any_scale(randn):
    """scale may be a SymFloat."""
    q, attend = randn(2, 4, 50, 64), minimal_attn.scaled_dot_product_attention
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for scale in 0.25, 0.375:
        assert torch.equal(compiled(q, q, q, scale=scale), attend(q, q, q, scale=scale))


# ------------------------------------------------------------------------------------- masks of ranges


def ranges_of_keys(kind, device, B=2, H=4, Nq=50, Nk=70):
    """Masks that give each query an interval of keys, in the shapes and strides in which models have them."""
    i, j = torch.arange(Nq, device=device)[:, None], torch.arange(Nk, device=device)
    length = torch.tensor([33, Nk - 1], device=device)[:, None, None, None]
    window = (j <= i + 3) & (j > i - 9)
    documents = (j // 20 == i // 20) & (j <= i)
    return {
        "padding": lambda: j < length,
        "padding on the left": lambda: (j >= length).expand(B, H, Nq, Nk),
        "causal": lambda: j <= i,
        "window": lambda: window & (i != 7),  # which sees nothing
        "documents": lambda: (documents & (j < length)).expand(B, 1, Nq, Nk),
        "shrinking": lambda: (j < Nk - i)[None],
        "rows": lambda: (i % 3 > 0).expand(1, 1, Nq, 1),
        "nothing": lambda: torch.zeros(1, Nk, dtype=torch.bool, device=device),
        "one number": lambda: torch.ones(B, 1, 1, 1, dtype=torch.bool, device=device),
        "transposed": lambda: window.T.contiguous().T.expand(B, 1, Nq, Nk),
        "every second": lambda: (j <= i).repeat_interleave(2, -1).repeat_interleave(3, 0)[::3, 1::2],
        "in a cache": lambda: F.pad(j <= i, (3, 41, 2, 5))[2 : Nq + 2, 3 : Nk + 3],
    }[kind]()


KINDS = ["padding", "padding on the left", "causal", "window", "documents", "shrinking", "rows", "nothing"]
KINDS += ["one number", "transposed", "every second", "in a cache"]


def both_passes(function, tensors, weight, *arguments, **options):
    tensors = [t.detach().requires_grad_() for t in tensors]
    o = function(*tensors, *arguments, **options)
    return o, *torch.autograd.grad(o, tensors, weight.to(o.dtype))


def check_all(actual, expected, dtype):
    hidden = expected[0].eq(0).all(-1)
    assert actual[0][hidden].eq(0).all() and actual[1][hidden].eq(0).all()
    for x, y in zip(actual, expected, strict=True):
        assert (x.double() - y).norm() <= (3 if x is actual[0] else 6) * ERROR_BOUND[dtype] * y.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Hkv", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_ranges(randn, device, dtype, Hkv, kind):
    """On a CPU they are served, as bool masks and as biases of 0 and -inf. On a GPU they are PyTorch's."""
    tensors = [randn(2, H, N, 64, dtype=dtype) for H, N in ((4, 50), (Hkv, 70), (Hkv, 70))]
    if device == "cuda" and Hkv == 4 and kind in ("rows", "one number"):
        pytest.skip("PyTorch's memory-efficient kernel refuses a mask of one column (torch 2.11)")
    mask, options = ranges_of_keys(kind, device), {"scale": 0.3, "enable_gqa": Hkv < 4}
    bias = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, -torch.inf)
    weight = randn(2, 4, 50, 64, dtype=dtype)
    with sdpa_kernel(SDPBackend.MATH):
        exact = both_passes(
            F.scaled_dot_product_attention, [t.double() for t in tensors], weight, mask, **options
        )
    for given in (mask, bias) if mask.dim() != 3 else (mask,):  # PyTorch has no fused kernel for a bias of 3
        with minimal_attn.activate() as activation:
            check_all(
                both_passes(F.scaled_dot_product_attention, tensors, weight, given, **options), exact, dtype
            )
        assert device != "cpu" or activation.calls == {"minimal_attn": 1}
        assert device == "cpu" or "minimal_attn" not in activation.calls
    check_all(
        both_passes(minimal_attn.scaled_dot_product_attention, tensors, weight, mask, **options), exact, dtype
    )
    found = minimal_attn.explain_scaled_dot_product_attention(*tensors, mask, **options)
    assert found == "PyTorch: attn_mask is given" if device == "cuda" else "ranges" in found.kernel


def test_masks_of_no_ranges(randn, device):
    """Two intervals, other heads, biases: PyTorch's bits, counted as such."""
    q, k, v = heads(randn, torch.float32)
    causal = ranges_of_keys("causal", device)
    hole, by_head = causal.clone(), causal.repeat(1, 4, 1, 1)
    hole[40, 20], by_head[0, 2, 30, 1] = False, False
    padded = torch.zeros(50, 70, device=device).masked_fill(~causal, -torch.inf)
    other = padded.clone()
    other[3, 2] = 0.5
    for mask in hole, by_head, hole.expand(2, 1, -1, -1), other, padded.masked_fill(~hole, -torch.inf):
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        with minimal_attn.activate() as activation:
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), expected)
        assert activation.calls == {"PyTorch: attn_mask is given": 1}
        with minimal_attn.activate(strict=True), pytest.raises(RuntimeError, match="attn_mask is given"):
            F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("mask", [torch.tensor(True), torch.arange(70) < 3])
def test_masks_that_pytorch_refuses(randn, device, mask):
    """They are refused while our kernels are active, too."""
    q, k, v = heads(randn, torch.float32)
    with pytest.raises((IndexError, RuntimeError)):
        F.scaled_dot_product_attention(q, k, v, mask.to(device))
    with minimal_attn.activate(), pytest.raises((IndexError, RuntimeError)):
        F.scaled_dot_product_attention(q, k, v, mask.to(device))


def test_a_mask_is_looked_at_in_each_call(randn, device):
    """It changes in place, by .data, too, and another one takes its memory."""
    q, k, v = heads(randn, torch.float32)
    mask = ranges_of_keys("padding", device)

    def change(n):
        mask.copy_(torch.arange(70, device=device) < n)

    def change_data():
        mask.data[:, :, :, 3:] = False

    def of_other_memory():
        nonlocal mask
        address = mask.data_ptr()
        del mask
        for n in range(9, 0, -1):  # until the allocator has given the memory again
            mask = (torch.arange(70, device=device) < n).expand(2, 1, 1, 70).contiguous()
            if mask.data_ptr() == address:
                break

    for act in lambda: None, lambda: change(20), change_data, of_other_memory, lambda: mask.zero_():
        act()
        with minimal_attn.activate() as activation:
            o = F.scaled_dot_product_attention(q, k, v, mask)
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
        assert (o - expected).norm() <= 1e-5 * expected.norm()
        assert device != "cpu" or activation.calls == {"minimal_attn": 1}


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("ours", ["forward", "backward"])
def test_one_pass_of_a_mask_is_served(randn, device, kind, ours):
    """PyTorch's passes take ours' results, and ours PyTorch's: with rows that see nothing, too."""
    tensors = [t.requires_grad_() for t in heads(randn, torch.float32)]
    mask = ranges_of_keys("window", device)
    bias = torch.zeros(50, 70, device=device).masked_fill(~mask, -torch.inf)
    weight = randn(2, 4, 50, 64)
    exact = both_passes(F.scaled_dot_product_attention, [t.double() for t in tensors], weight, mask)
    with minimal_attn.activate() if ours == "forward" else contextlib.nullcontext():
        o = F.scaled_dot_product_attention(*tensors, mask if kind == "bool" else bias)
    with minimal_attn.activate() if ours == "backward" else contextlib.nullcontext():
        check_all((o, *torch.autograd.grad(o, tensors, weight)), exact, torch.float32)


@pytest.mark.parametrize("way", ["compile", "make_fx", "trace", "vmap"])
def test_traced_masks(randn, device, way):
    """A graph serves any mask: its operator looks, as long as it is active, or it is PyTorch's."""
    q, k, v = heads(randn, torch.float32)
    masks = [ranges_of_keys("documents", device).contiguous(), ranges_of_keys("causal", device)[None, None]]
    masks = [*(m.expand(2, 1, -1, -1) for m in masks), torch.rand(2, 1, 50, 70, device=device) < 0.5]

    def attend(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask)

    torch.compiler.reset()
    with minimal_attn.activate() as activation:
        if way == "compile":
            function = torch.compile(attend, fullgraph=True)
        elif way == "make_fx":
            function = torch.fx.experimental.proxy_tensor.make_fx(attend)(q, k, v, masks[0])
        elif way == "trace":
            function = torch.jit.trace(attend, (q, k, v, masks[0]), check_trace=False)
        else:
            function = torch.vmap(lambda q, k, v, m: attend(q[None], k[None], v[None], m[None])[0])
        before = activation.calls.get("minimal_attn", 0)
        for mask in masks:
            expected = attend(q.double(), k.double(), v.double(), mask)
            torch.testing.assert_close(function(q, k, v, mask).double(), expected, rtol=1e-4, atol=1e-5)
        if way == "compile" and device == "cpu":
            assert activation.calls["minimal_attn"] == before + 2
    for mask in masks:
        torch.testing.assert_close(function(q, k, v, mask), attend(q, k, v, mask), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- activate()


def active_name():
    return nn.attention.current_flash_attention_impl() if HAS_REGISTRY else None


@pytest.fixture(autouse=True)
def ends_inactive():
    yield
    assert active_name() is None
    before = dict(minimal_attn._C.sdpa_calls())
    q = torch.zeros(1, 1, 2, 8)
    F.scaled_dot_product_attention(q, q, q)
    assert dict(minimal_attn._C.sdpa_calls()) == before


def heads(randn, dtype, Nq=50, Nk=70, d=64):
    return randn(2, 4, Nq, d, dtype=dtype), randn(2, 4, Nk, d, dtype=dtype), randn(2, 4, Nk, d, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("d", [64, 40, 128])
def test_activated_forward_and_backward(device, randn, dtype, options, d):
    """o, its strides and all gradients; PyTorch's own error is the yardstick of gradients."""
    tensors = heads(randn, dtype, Nq=70, d=d)
    # (B, N, H, d) in memory, as models have it
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in tensors]
    weight = randn(2, 4, 70, d, dtype=dtype)

    def run(tensors):
        o = F.scaled_dot_product_attention(*tensors, **options)
        return o, *torch.autograd.grad(o, tensors, weight.to(o.dtype))

    exact = run([t.detach().double().requires_grad_() for t in tensors])
    plain = run(tensors)
    with minimal_attn.activate() as activation:
        actual = run(tensors)
    assert activation.calls == {"minimal_attn": 1}
    assert actual[0].stride() == plain[0].stride()
    for x, pytorch, expected in zip(actual, plain, exact, strict=True):
        assert x.dtype == dtype and x.shape == expected.shape
        # PyTorch's gradients, where faster, compute P again from our log-sum-exp, with other products.
        is_ours = x is actual[0] or minimal_attn._C.has_fast_backward(tensors[0])
        rounding = (4 if is_ours else 32) * torch.finfo(dtype).eps
        bound = 2 * (pytorch.double() - expected).norm() + rounding * expected.norm()
        assert (x.double() - expected).norm() <= bound


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_activated_strides(device, randn, order):
    """o and the gradients have PyTorch's strides, for any order of q's dimensions."""
    for size in itertools.product((1, 2), (1, 3), (1, 5), (1, 8)):
        q = randn(*(size[i] for i in order)).permute([order.index(i) for i in range(4)]).requires_grad_()

        def run(q):
            o = F.scaled_dot_product_attention(q, q, q)
            return o, *torch.autograd.grad(o, q, torch.ones_like(o))

        try:
            plain = run(q)
        except RuntimeError:  # of the memory-efficient operator of CUDA, for some strides of q
            continue
        with minimal_attn.activate():
            actual = run(q)
        assert [t.stride() for t in actual] == [t.stride() for t in plain], (size, q.stride())
        torch.testing.assert_close(actual, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_every_operator_of_cuda(randn, device, kind, dtype, is_causal, requires_grad, tokens_first):
    if device == "cpu" or (dtype == torch.float32 and kind != "EFFICIENT_ATTENTION"):
        pytest.skip("not an operator of this device and dtype")
    tensors = heads(randn, dtype, Nq=70)
    if tokens_first:  # (B, N, H, d) in memory, as models have it
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    tensors = [t.requires_grad_(requires_grad) for t in tensors]
    exact = [t.detach().double().requires_grad_(requires_grad) for t in tensors]
    weight = randn(2, 4, 70, 64, dtype=dtype)
    expected = F.scaled_dot_product_attention(*exact, is_causal=is_causal)
    with sdpa_kernel(getattr(SDPBackend, kind)):
        try:
            plain = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
        except RuntimeError as error:
            pytest.skip(f"PyTorch has it not: {error}")
    with minimal_attn.activate() as activation, sdpa_kernel(getattr(SDPBackend, kind)):
        o = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
        check(o, expected, dtype)
        assert o.stride() == plain.stride()
        if requires_grad:
            found = torch.autograd.grad(o, tensors, weight)
    assert activation.calls == {"minimal_attn": 1}
    if requires_grad:
        for x, y in zip(found, torch.autograd.grad(expected, exact, weight.double()), strict=True):
            check(x, y, dtype, factor=6)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_outputs_are_as_on_meta(randn, device, kind):
    """torch.compile checks the tensors of an operator against those of its shape function."""
    if device == "cpu" and kind != "flash":
        pytest.skip("not an operator of this device")
    name = f"_scaled_dot_product_{kind}_attention" + "_for_cpu" * (device == "cpu")
    call = getattr(torch.ops.aten, name).default
    tensors, more = heads(randn, torch.float16), () if kind == "flash" else (None, True)
    expected = call(*(t.to("meta") for t in tensors), *more)
    with minimal_attn.activate() as activation:
        actual = call(*tensors, *more)
    assert activation.calls == {"minimal_attn": 1}
    for x, y in zip(actual, expected, strict=True):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_pytorch_refuses_the_gradient_of_no_bias(randn, device):
    if device == "cpu":
        pytest.skip("not an operator of this device")
    q, k, v = heads(randn, torch.float16)
    with minimal_attn.activate():
        o, *saved = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        with pytest.raises(RuntimeError, match="no bias"):
            torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                torch.ones_like(o), q, k, v, None, o, *saved, 0.0, (True, True, True, True)
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_whose_gradients(randn, device, kind, dtype):
    """Our kernels' bits where they are fast; PyTorch's where there is dropout."""
    if (device == "cpu") > (kind == "FLASH_ATTENTION") or (device == "cuda" and dtype == torch.float32):
        pytest.skip("not an operator of this device and dtype")
    tensors = [t.requires_grad_() for t in heads(randn, dtype, Nq=70)]

    def grads(function, **options):
        torch.manual_seed(1)
        with sdpa_kernel(getattr(SDPBackend, kind)):
            return torch.autograd.grad(function(*tensors, **options).sum(), tensors)

    assert minimal_attn._C.has_fast_backward(tensors[0]) or device == "cuda"
    ours = grads(minimal_attn.forward, causal=True, offset=0)
    try:
        dropped = None if device == "cpu" else grads(F.scaled_dot_product_attention, dropout_p=0.3)
    except RuntimeError as error:
        pytest.skip(f"PyTorch has it not: {error}")
    with minimal_attn.activate():
        found = grads(F.scaled_dot_product_attention, is_causal=True)
        if minimal_attn._C.has_fast_backward(tensors[0]):
            assert all(map(torch.equal, found, ours))
        if dropped:  # cuDNN may add in any order
            torch.testing.assert_close(grads(F.scaled_dot_product_attention, dropout_p=0.3), dropped)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Nq", [1, 70, 127, 300])
@pytest.mark.parametrize("Nk", [70, 300])  # one query and 300 keys are for decode.cu
@pytest.mark.parametrize("scale", [1, 1e25])  # where float16 can't carry a float32, Hopper has another kernel
def test_padding_of_the_log_sum_exp(randn, device, dtype, Nq, Nk, scale):
    if device == "cpu" or (scale > 1 and dtype == torch.float16):
        pytest.skip("only CUDA's memory-efficient operator pads; float16 ends at 65504")
    q, k, v = heads(randn, dtype, Nq=Nq, Nk=Nk)
    q, k = q * scale, k / scale
    with minimal_attn.activate():
        _, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    assert lse.shape[2] % 32 == 0 and lse[..., Nq:].eq(torch.inf).all()
    expected = (q.double() @ k.double().mT / 8).logsumexp(-1)
    torch.testing.assert_close(lse[..., :Nq].double(), expected, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("kind", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_activated_in_a_cuda_graph(randn, device, kind):
    """Both passes, with rows of the log-sum-exp that only pad it."""
    if device == "cpu":
        pytest.skip("there are no graphs of a CPU")
    tensors = [t.requires_grad_() for t in heads(randn, torch.float16, Nq=70)]
    weight = randn(2, 4, 70, 64, dtype=torch.float16)

    def run():
        o = F.scaled_dot_product_attention(*tensors)
        return o, *torch.autograd.grad(o, tensors, weight)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with minimal_attn.activate(), sdpa_kernel(getattr(SDPBackend, kind)):
        with torch.cuda.stream(stream):
            run()
            with torch.cuda.graph(graph, stream=stream):
                captured = run()
        expected = run()
    with torch.no_grad():
        for t in captured:
            t.fill_(torch.nan)
    graph.replay()
    for x, y in zip(captured, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def test_activated_passes_on(device, randn):
    """Masks, dropout and float64 reach PyTorch's kernels: the same bits, and a count of each."""
    q, k, v = heads(randn, torch.float32)
    mask = randn(50, 70)
    calls = {
        "PyTorch: attn_mask is given": lambda: F.scaled_dot_product_attention(q, k, v, mask),
        "PyTorch: the dtype is not float32, float16 or bfloat16": lambda: F.scaled_dot_product_attention(
            q.double(), k.double(), v.double()
        ),
        "PyTorch: a head dimension above 256, or two different ones": lambda: F.scaled_dot_product_attention(
            *(t.repeat(1, 1, 1, 5) for t in (q, k, v))
        ),
    }
    if device == "cuda":
        calls.pop(
            "PyTorch: the dtype is not float32, float16 or bfloat16"
        )  # there PyTorch has no fused kernel
    expected = [call() for call in calls.values()]
    with minimal_attn.activate() as activation:
        actual = [call() for call in calls.values()]
        torch.manual_seed(1)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert all(map(torch.equal, actual, expected))
    torch.manual_seed(1)
    assert torch.equal(dropped, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert activation.calls.items() >= dict.fromkeys(calls, 1).items()
    assert "minimal_attn" not in activation.calls


def test_activations_nest_and_end():
    q = torch.zeros(1, 1, 2, 8)
    with minimal_attn.activate() as outer:
        with minimal_attn.activate() as inner:
            F.scaled_dot_product_attention(q, q, q)
        assert inner.calls == {"minimal_attn": 1}
        F.scaled_dot_product_attention(q, q, q)
        assert outer.calls == {"minimal_attn": 2} and inner.calls == {"minimal_attn": 1}
    outer.remove()
    with pytest.raises(KeyError), minimal_attn.activate():
        raise KeyError
    activation = minimal_attn.activate()
    activation.remove()
    assert activation.calls == {}


def test_activations_end_in_any_order():
    """The first one that ends leaves the kernels to the others; the last one ends them."""
    q = torch.zeros(1, 1, 2, 8)
    first, second, third = (minimal_attn.activate() for _ in range(3))
    for ended in first, third:
        ended.remove()
        ended.remove()
        F.scaled_dot_product_attention(q, q, q)
    second.remove()
    F.scaled_dot_product_attention(q, q, q)
    assert [x.calls.get("minimal_attn", 0) for x in (first, third, second)] == [0, 1, 2]


@pytest.mark.skipif(not HAS_REGISTRY, reason="this torch has no registry of attention kernels")
def test_registry():
    """By PyTorch's names; another one that was active is active again afterwards."""
    removed = []

    class Other:
        def remove(self):
            removed.append(1)

    nn.attention.register_flash_attention_impl("other", register_fn=Other)
    assert "minimal_attn" in nn.attention.list_flash_attention_impls()
    nn.attention.activate_flash_attention_impl("other")
    with minimal_attn.activate():
        assert active_name() == "minimal_attn" and removed == [1]
    assert active_name() == "other"
    nn.attention.activate_flash_attention_impl("minimal_attn")
    q = torch.zeros(1, 1, 2, 8)
    before = minimal_attn._C.sdpa_calls().get("minimal_attn", 0)
    F.scaled_dot_product_attention(q, q, q)
    assert minimal_attn._C.sdpa_calls()["minimal_attn"] == before + 1
    with minimal_attn.activate():  # ends nothing that it didn't begin
        pass
    assert active_name() == "minimal_attn"
    nn.attention.restore_flash_attention_impl()


@pytest.mark.skipif(not HAS_REGISTRY, reason="this torch has no registry of attention kernels")
def test_another_kernel_takes_over():
    """What was activated in the meantime stays, whoever ends afterwards."""

    class Other:
        def remove(self):
            pass

    nn.attention.register_flash_attention_impl("other", register_fn=Other)
    first = minimal_attn.activate()
    nn.attention.activate_flash_attention_impl("other")
    second = minimal_attn.activate()
    first.remove()
    assert active_name() == "minimal_attn"
    second.remove()
    assert active_name() == "other"
    third = minimal_attn.activate()
    nn.attention.restore_flash_attention_impl()
    third.remove()
    assert active_name() is None


@pytest.mark.parametrize("activated", [False, True])
def test_forward_mode(device, randn, activated):
    """As PyTorch: its fused operators refuse, its math path computes."""
    q, k, v = randn(1, 2, 5, 8), randn(1, 2, 7, 8), randn(1, 2, 7, 8)
    function = F.scaled_dot_product_attention if activated else minimal_attn.scaled_dot_product_attention

    def derivative():
        return torch.func.jvp(lambda q: function(q, k, v), (q,), (q,))

    with minimal_attn.activate() if activated else contextlib.nullcontext():
        with pytest.raises(NotImplementedError, match="forward AD"):
            derivative()
        with sdpa_kernel(SDPBackend.MATH):
            o, tangent = derivative()
    x = torch.tensor(1.0, dtype=torch.float64, device=device, requires_grad=True)
    exact = F.scaled_dot_product_attention(q.double() * x, k.double(), v.double())
    weight = torch.randn_like(exact)
    [expected] = torch.autograd.grad((exact * weight).sum(), x)
    check(o, exact.detach(), torch.float32)
    torch.testing.assert_close((tangent.double() * weight).sum(), expected, rtol=1e-4, atol=1e-4)


def test_activating_warns_and_prints_nothing():
    code = "import minimal_attn, warnings; warnings.simplefilter('error'); minimal_attn.activate().remove()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_activated_in_other_threads():
    q = torch.randn(1, 2, 30, 8)
    expected = F.scaled_dot_product_attention(q, q, q)
    results = []
    with minimal_attn.activate() as activation:
        threads = [
            threading.Thread(target=lambda: results.append(F.scaled_dot_product_attention(q, q, q)))
            for _ in range(4)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert activation.calls == {"minimal_attn": 4}
    for result in results:
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("training", [False, True])
def test_activated_autocast(device, randn, training):
    q, k, v = (t.requires_grad_(training) for t in heads(randn, torch.float32))
    with torch.autocast(device, torch.bfloat16):
        with minimal_attn.activate() as activation:
            o = F.scaled_dot_product_attention(q, k, v)
    check(o, F.scaled_dot_product_attention(q.double(), k.double(), v.double()), torch.bfloat16)
    assert activation.calls == {"minimal_attn": 1}
    if training:
        o.sum().backward()
        assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("dynamic", [False, True])
def test_activated_compile(device, randn, dynamic):
    """Compiled training calls the same operators, with the strides that the compiler expects."""
    torch.compiler.reset()

    def loss(x, k, v):
        q = (x * 2).unflatten(-1, (4, 16)).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).square().sum()
        )

    inputs = [randn(*shape).requires_grad_() for shape in ((2, 50, 64), (2, 4, 50, 16), (2, 4, 50, 16))]
    expected = loss(*inputs)
    expected_grads = torch.autograd.grad(expected, inputs)
    with minimal_attn.activate() as activation:
        actual = torch.compile(loss, fullgraph=True, dynamic=dynamic)(*inputs)
        grads = torch.autograd.grad(actual, inputs)
    assert activation.calls["minimal_attn"] >= 1
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", [None, "causal", "padding"])
def test_multihead_attention(device, randn, generator, mask, need_weights):
    layer = nn.MultiheadAttention(64, 4, batch_first=True).to(device)
    x = randn(2, 30, 64)
    options = {"need_weights": need_weights}
    if mask == "causal":
        causal = nn.Transformer.generate_square_subsequent_mask(30, device=device)
        options |= {"attn_mask": causal, "is_causal": True}
    if mask == "padding":
        options["key_padding_mask"] = torch.arange(30, device=device).expand(2, -1) >= 20
    expected, _ = layer.double()(x.double(), x.double(), x.double(), **{**options, **_double(options)})
    layer = layer.float()
    with minimal_attn.activate() as activation:
        actual, _ = layer(x, x, x, **options)
    check(actual, expected, torch.float32)
    served = not need_weights and (mask != "padding" or device == "cpu")
    assert activation.calls.get("minimal_attn", 0) == int(served)


def _double(options):
    return {
        x: t.double() for x, t in options.items() if isinstance(t, torch.Tensor) and t.is_floating_point()
    }


@pytest.mark.parametrize("training", [False, True])
def test_transformer_encoder_layer(device, randn, training):
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True).to(device).train(training)
    x = randn(2, 30, 64)
    with torch.set_grad_enabled(training):
        expected = copy.deepcopy(layer).double()(x.double())
        with minimal_attn.activate() as activation:
            actual = layer(x)
    check(actual, expected, torch.float32)
    if not training:
        fast_path = "PyTorch: MultiheadAttention's fast path"
        # On CUDA the fast path may call the function.
        assert activation.calls in ({fast_path: 1}, *[{"minimal_attn": 1}] * (device == "cuda"))
    if training:
        assert activation.calls == {"minimal_attn": 1}
        expected.sum().backward()
        actual.sum().backward()
        assert layer.self_attn.in_proj_weight.grad.isfinite().all()
