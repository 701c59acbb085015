"""Masks of F.scaled_dot_product_attention that give each query a range of keys."""

import contextlib

import pytest
import torch
from activation import ends_inactive, heads  # noqa: F401
from conftest import DTYPES, ERROR_BOUND
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal_attn

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::minimal_attn.FallbackWarning"
)


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
    """They are served as bool masks and as biases of 0 and -inf, on a GPU on Hopper in half types."""
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
        is_served = minimal_attn._C.has_fast_pairs(tensors[0])
        assert (
            activation.calls == {"minimal_attn": 1} if is_served else "minimal_attn" not in activation.calls
        )
    check_all(
        both_passes(minimal_attn.scaled_dot_product_attention, tensors, weight, mask, **options), exact, dtype
    )
    found = minimal_attn.explain_scaled_dot_product_attention(*tensors, mask, **options)
    if device == "cpu":
        assert "ranges" in found.kernel
    else:
        assert "general" in found.kernel if is_served else found == "PyTorch: attn_mask is given"


def test_masks_of_no_ranges(randn, device):
    """Two intervals, other heads, biases: on a CPU forward's attn_mask, on a GPU PyTorch's bits."""
    q, k, v = heads(randn, torch.float32)
    causal = ranges_of_keys("causal", device)
    hole, by_head = causal.clone(), causal.repeat(1, 4, 1, 1)
    hole[40, 20], by_head[0, 2, 30, 1] = False, False
    padded = torch.zeros(50, 70, device=device).masked_fill(~causal, -torch.inf)
    other = padded.clone()
    other[3, 2] = 0.5
    for mask in hole, by_head, hole.expand(2, 1, -1, -1), other, padded.masked_fill(~hole, -torch.inf):
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        if device == "cpu":
            with minimal_attn.activate(strict=True):
                o = F.scaled_dot_product_attention(q, k, v, mask)
            assert torch.equal(o, minimal_attn.forward(q, k, v, attn_mask=mask))
            torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
            continue
        with minimal_attn.activate() as activation:
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), expected)
        assert activation.calls == {"PyTorch: attn_mask is given": 1}
        with minimal_attn.activate(strict=True), pytest.raises(RuntimeError, match="attn_mask is given"):
            F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("mask", [torch.tensor(True), torch.arange(70) < 3])
def test_masks_that_pytorch_refuses(randn, device, mask):
    """They are refused while our kernels are active, too."""
    if device == "cuda" and mask.dim() == 1:
        pytest.skip("PyTorch's memory-efficient kernel takes a mask of one dimension (torch 2.11)")
    q, k, v = heads(randn, torch.float32)
    with pytest.raises((IndexError, RuntimeError)):
        F.scaled_dot_product_attention(q, k, v, mask.to(device))
    with minimal_attn.activate(), pytest.raises((IndexError, RuntimeError)):
        F.scaled_dot_product_attention(q, k, v, mask.to(device))


@pytest.mark.parametrize("way", ["activated", "function", "compiled", "func.grad"])
@pytest.mark.parametrize("shape", [(2, 4, 50, 70), (1, 4, 50, 70), (50, 70), (4, 1, 70)], ids=str)
def test_gradient_of_a_bias(randn, device, dtype, shape, way):
    """PyTorch has no fused kernel for it on a CPU."""
    if device == "cuda":
        pytest.skip("masks are PyTorch's there")
    tensors = [*heads(randn, dtype), randn(*shape, dtype=dtype)]
    weight = randn(2, 4, 50, 64, dtype=dtype)

    def gradients(function, tensors):
        if way == "func.grad" and tensors[0].dtype == dtype:
            loss = lambda *t: (function(*t) * weight).sum()  # noqa: E731
            return torch.func.grad(loss, argnums=(0, 1, 2, 3))(*tensors)
        leaves = [t.clone().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*leaves), leaves, weight.to(leaves[0].dtype))

    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(F.scaled_dot_product_attention, [t.double() for t in tensors])
    function = F.scaled_dot_product_attention
    if way == "function":
        function = minimal_attn.scaled_dot_product_attention
    torch.compiler.reset()
    with minimal_attn.activate() as activation:
        if way == "compiled":
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        found = gradients(function, tensors)
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).norm() <= 6 * ERROR_BOUND[dtype] * y.norm()
    assert device != "cpu" or way == "function" or set(activation.calls) <= {"minimal_attn"}


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("batch", [(), (3,), (3, 2)], ids=str)  # beside B
def test_masks_of_other_dimensions(randn, device, B, batch, activated):
    """AlphaFold's pair bias, shared along a batch dimension, and its gradient; masks of fewer dimensions."""
    N = (B, *batch) if batch else ()
    q, k, v = randn(*N, 4, 9, 32), randn(*N, 4, 7, 32), randn(*N, 2 if batch else 4, 7, 24)
    k = k[..., :2, :, :] if batch else k
    weight = randn(*N, 4, 9, 24)
    ones = [1] * len(batch)
    shapes = [(9, 7), (4, 1, 7), (*ones, 4, 9, 7), (*batch, 1, 1, 7)]
    if batch:
        shapes += [(B, *ones, 4, 9, 7), (B, *ones, 1, 1, 7), (B, *batch, 1, 9, 1), (1, *batch, 4, 9, 7)]
    function = F.scaled_dot_product_attention if activated else minimal_attn.scaled_dot_product_attention
    for shape in shapes:
        for mask in randn(*shape), randn(*shape) < 1:
            terms = [mask] if mask.dtype != torch.bool else []

            def run(function, dtype, mask=mask, terms=terms):
                leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *terms)]
                o = function(*leaves[:3], leaves[3] if terms else mask, enable_gqa=bool(batch))
                return o, *torch.autograd.grad(o, leaves, weight.to(dtype))

            with sdpa_kernel(SDPBackend.MATH):
                expected = run(F.scaled_dot_product_attention, torch.float64)
            with minimal_attn.activate() if activated else contextlib.nullcontext() as activation:
                found = run(function, torch.float32)
            for x, y in zip(found, expected, strict=True):
                assert x.shape == y.shape
                torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)
            if activated and device == "cpu":
                assert set(activation.calls) == {"minimal_attn"}
            explain = minimal_attn.explain_scaled_dot_product_attention
            assert isinstance(explain(q, k, v, mask, enable_gqa=bool(batch)), str) == (device == "cuda")


def test_masks_that_make_the_result_larger(randn, device):
    """PyTorch refuses them, and so do we, with its words."""
    q, mask = randn(4, 9, 32), randn(3, 1, 9, 9)
    for function in F.scaled_dot_product_attention, minimal_attn.scaled_dot_product_attention:
        with minimal_attn.activate(), pytest.raises(RuntimeError):
            function(q, q, q, mask)


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
            assert activation.calls["minimal_attn"] == before + 3
    for mask in masks:
        torch.testing.assert_close(function(q, k, v, mask), attend(q, k, v, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 256])
def test_dropout(randn, device, dtype, d):
    """On a CPU it is served, on a Hopper GPU in half types where there is a mask or a large d."""
    q, k, v = heads(randn, dtype, d=d)
    seen = randn(50, 70) < 1
    for mask in None, seen:
        options = dict(attn_mask=mask, dropout_p=0.4)
        may = device == "cpu" or ((mask is not None or d > 128) and minimal_attn._C.has_fast_pairs(q))
        found = minimal_attn.explain_scaled_dot_product_attention(q, k, v, **options)
        assert isinstance(found, str) != may
        if not may:
            continue
        torch.manual_seed(4)
        expected = minimal_attn.forward(q, k, v, **options)
        for function in F.scaled_dot_product_attention, minimal_attn.scaled_dot_product_attention:
            with minimal_attn.activate(strict=True):
                torch.manual_seed(4)
                o = function(q, k, v, **options)
            torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-2)
            assert torch.equal(o == 0, expected == 0)
