"""Calls that F.scaled_dot_product_attention and the function of its signature leave to PyTorch's kernels.

They are told: a FallbackWarning for each reason, a count, an error where that was asked for. And they are
right: rows that see no key are 0, also where PyTorch would take a kernel of cuDNN that gives something else.
"""

import contextlib
import threading
import warnings

import pytest
import torch
from activation import HAS_REGISTRY, active_name, check, heads, left_to_pytorch, passed_on
from conftest import DTYPES
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal_attn

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::minimal_attn.FallbackWarning"
)


@pytest.fixture(autouse=True)
def nothing_told():
    """Each test gets its own warnings."""
    minimal_attn._fallback._told.clear()


def told(function):
    """The FallbackWarnings of a call, and its result."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = function()
    return [w for w in found if w.category is minimal_attn.FallbackWarning], result


def test_one_warning_a_reason(randn):
    """It names the reason and shows the line that calls. strict raises the same text instead."""
    for why, tensors, options in {why: case for case in passed_on(randn) if (why := case[0])}.values():
        minimal_attn._fallback._told.clear()

        def call(tensors=tensors, **options):
            return minimal_attn.scaled_dot_product_attention(*tensors, **options)

        [warning], o = told(lambda: call(**options))  # noqa: B023
        found = minimal_attn.explain_scaled_dot_product_attention(*tensors, **options)
        assert str(warning.message).endswith(found) and why in found
        assert warning.filename == __file__
        assert told(lambda: call(**options))[0] == []  # noqa: B023
        with pytest.raises(RuntimeError, match="^minimal_attn does not serve.*strict=True") as error:
            call(**options, strict=True)
        assert str(error.value).endswith(found) and "\n" not in str(error.value)
    q = randn(2, 4, 5, 8)
    warned, o = told(lambda: minimal_attn.scaled_dot_product_attention(q, q, q, strict=True))
    assert warned == [] and o.shape == q.shape


def test_no_warning_where_pytorch_refuses(randn):
    q, k = randn(2, 4, 5, 8), randn(2, 3, 5, 8)

    def call():
        with pytest.raises(RuntimeError):
            minimal_attn.scaled_dot_product_attention(q, k, k)

    assert told(call)[0] == []


def test_honours_sdpa_kernel(randn, device):
    """Without a fused kernel that is allowed the call is PyTorch's, which then has second derivatives."""
    q, k, v = (randn(1, 2, 5, 8).requires_grad_() for _ in range(3))
    fused = [SDPBackend.FLASH_ATTENTION]
    if device == "cuda":
        fused += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for backend in fused:
        with sdpa_kernel([backend, SDPBackend.MATH]):
            found = minimal_attn.explain_scaled_dot_product_attention(q.detach(), k.detach(), v.detach())
        assert isinstance(found, minimal_attn.Explanation)

    def second(function, *tensors):
        o = function(*tensors, is_causal=True)
        first = torch.autograd.grad(o.square().sum(), tensors, create_graph=True)
        return o, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    with sdpa_kernel(SDPBackend.MATH):
        found = minimal_attn.explain_scaled_dot_product_attention(q, k, v)
        assert found == "PyTorch: sdpa_kernel allows no fused kernel"
        actual = second(minimal_attn.scaled_dot_product_attention, q, k, v)
        expected = second(
            F.scaled_dot_product_attention, *(t.detach().double().requires_grad_() for t in (q, k, v))
        )
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-3)
        with pytest.raises(RuntimeError, match="no fused kernel"):
            minimal_attn.scaled_dot_product_attention(q, k, v, strict=True)
        torch.compiler.reset()
        compiled = torch.compile(
            lambda q: minimal_attn.scaled_dot_product_attention(q, q, q) * 1,
            fullgraph=True,
            backend="aot_eager",
        )
        assert torch.equal(compiled(q), F.scaled_dot_product_attention(q, q, q))


def separate_steps(randn):
    """Calls for which PyTorch takes no fused kernel on a CPU."""
    q, attend = randn(2, 4, 5, 8), F.scaled_dot_product_attention
    bias = randn(5, 5).requires_grad_()

    def by_math():
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q, q, q)

    def by_autocast():
        with torch.autocast(q.device.type, torch.bfloat16):
            return attend(q[0, 0], q[0, 0], q[0, 0])

    def in_inference_mode():
        with torch.inference_mode():
            x = q[0, 0].clone()
            return attend(x, x, x)

    return {
        "2 dimensions": lambda: attend(q[0, 0], q[0, 0], q[0, 0]),
        "5 dimensions": lambda: attend(q[None], q[None], q[None]),
        "batches broadcast": lambda: attend(q, q[:1], q[:1]),
        "not contiguous": lambda: attend(q.mT.contiguous().mT, q, q),
        "bias with gradients": lambda: attend(q, q, q, bias),
        "MATH": by_math,
        "inference": in_inference_mode,
        "heads broadcast": lambda: attend(q, q[:, :1], q[:, :1]),
        "vmap": lambda: torch.vmap(lambda x: attend(x, x, x))(q[0]),
        "func.grad": lambda: torch.func.grad(lambda x: attend(x.mT.contiguous().mT, x, x).sum())(q),
        "autocast": by_autocast,
    }


STAY = {"not contiguous", "MATH", "func.grad"}  # the others are served


def test_second_derivatives_stay_with_math(randn):
    """Calls of 3 dimensions have them by sdpa_kernel(MATH), as those of 4 have."""
    q = randn(4, 5, 8).requires_grad_()
    with minimal_attn.activate() as activation, sdpa_kernel(SDPBackend.MATH):
        [g] = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q, create_graph=True)
        g.square().sum().backward()
    assert q.grad.isfinite().all() and activation.calls == {"PyTorch: sdpa_kernel allows no fused kernel": 1}


@pytest.mark.parametrize("name", separate_steps(torch.randn).keys())
def test_separate_steps_are_told(randn, device, name):
    call = separate_steps(randn)[name]
    torch.manual_seed(1)
    expected = call()
    if name not in STAY and not (name == "bias with gradients" and device == "cuda"):
        with minimal_attn.activate(strict=True) as activation:
            warned, actual = told(call)
        assert warned == [] and activation.calls == {"minimal_attn": 1}
        atol = 4e-3 if expected.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            actual, expected, rtol=0.016 if expected.dtype == torch.bfloat16 else 1.3e-6, atol=atol
        )
        return
    with minimal_attn.activate() as activation:
        torch.manual_seed(1)
        [warning], actual = told(call)
        assert told(call)[0] == []
    assert torch.equal(actual, expected)
    why = "PyTorch: sdpa_kernel allows no fused kernel" if name == "MATH" else "PyTorch chose no fused kernel"
    if device == "cuda" and why not in activation.calls:  # fused kernels of CUDA serve some of these calls
        [why] = activation.calls
        assert why.startswith("PyTorch: ")
    assert activation.calls == {why: 2} and why in str(warning.message)
    assert warning.filename == __file__
    with minimal_attn.activate(strict=True), pytest.raises(RuntimeError, match="strict=True") as error:
        call()
    assert why in str(error.value) and "\n" not in str(error.value)


def test_what_is_passed_on_is_told(randn):
    q, k, v = heads(randn, torch.float32)
    why, call = left_to_pytorch(randn)
    for use in torch.no_grad, torch.enable_grad:
        with minimal_attn.activate() as activation, use():
            minimal_attn._fallback._told.clear()
            [warning], _ = told(call)
            assert why in str(warning.message)
            assert told(call)[0] == []
        assert activation.calls == {why: 2}
    with minimal_attn.activate():
        assert told(call)[0] == []  # nor in another activation
        assert told(lambda: F.scaled_dot_product_attention(q, k, v))[0] == []


def test_strict(randn):
    """Of several activations one that is strict suffices."""
    q, k, v = heads(randn, torch.float32)
    why, call = left_to_pytorch(randn)

    def refuses():
        try:
            call()
        except RuntimeError as error:
            assert str(error).endswith(f"strict=True. {why}")
            return True
        return False

    with minimal_attn.activate(), minimal_attn.activate(strict=True) as strict:
        F.scaled_dot_product_attention(q, k, v)
        assert refuses()
        thread = threading.Thread(target=lambda: results.append(refuses()))
        results = []
        thread.start(), thread.join()
        assert results == [True]
        strict.remove()
        assert not refuses()
    strict = minimal_attn.activate(strict=True)
    with minimal_attn.activate():
        assert refuses()
    strict.remove()
    with minimal_attn.activate():
        assert not refuses()
    with pytest.raises(TypeError, match="^strict must be a bool, but was 1$"):
        minimal_attn.activate(strict=1)
    if HAS_REGISTRY:
        nn.attention.activate_flash_attention_impl("minimal_attn")
        assert not refuses()
        nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("use", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compiled_separate_steps_are_told(randn, use):
    """They count and warn while they are traced, and strict raises there."""
    q = randn(1, 2, 5, 8).mT.contiguous().mT.requires_grad_(use is torch.enable_grad)
    torch.compiler.reset()
    with minimal_attn.activate() as activation, use():
        compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q) * 2, fullgraph=True)
        warned, o = told(lambda: compiled(q))
        assert [w for w in warned if "PyTorch chose no fused kernel" in str(w.message)]
    torch.testing.assert_close(o, F.scaled_dot_product_attention(q, q, q) * 2)
    assert activation.calls.keys() == {"PyTorch chose no fused kernel"}
    torch.compiler.reset()
    with minimal_attn.activate(strict=True), use(), pytest.raises(Exception, match="no fused kernel"):
        torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q) * 3, fullgraph=True)(q)


@pytest.mark.parametrize("training", [False, True])
def test_fast_path_is_told(device, randn, training):
    layer = nn.MultiheadAttention(64, 4, batch_first=True).to(device).train(training)
    x = randn(2, 30, 64)

    def call():
        return layer(x, x, x, need_weights=False)

    fast_path = "PyTorch: MultiheadAttention's fast path"
    with torch.no_grad(), minimal_attn.activate() as activation:
        warned, _ = told(call)
    # On CUDA the fast path may call the function.
    if training or (device == "cuda" and "minimal_attn" in activation.calls):
        assert activation.calls == {"minimal_attn": 1} and warned == []
        return
    assert activation.calls == {fast_path: 1} and fast_path in str(warned[0].message)
    with torch.no_grad(), minimal_attn.activate(strict=True), pytest.raises(RuntimeError, match=fast_path):
        call()


@pytest.mark.skipif(not HAS_REGISTRY, reason="this torch has no registry of attention kernels")
@pytest.mark.parametrize("before", [None, "other"])
def test_others_end_an_activation(before):
    """PyTorch's registry ends what is active before it activates others, and fails without restoring it."""

    def fail():
        raise ImportError("not installed")

    nn.attention.register_flash_attention_impl(
        "other", register_fn=lambda: type("", (), {"remove": lambda self: 0})()
    )
    nn.attention.register_flash_attention_impl("missing", register_fn=fail)
    q = torch.zeros(1, 1, 2, 8)

    def activate_missing():
        with pytest.raises(ImportError):
            nn.attention.activate_flash_attention_impl("missing")

    for end in activate_missing, nn.attention.restore_flash_attention_impl:
        if before:
            nn.attention.activate_flash_attention_impl(before)
        with minimal_attn.activate() as activation:
            F.scaled_dot_product_attention(q, q, q)
            [warning], _ = told(end)
            assert "activate() ends here" in str(warning.message) and warning.filename == __file__
            F.scaled_dot_product_attention(q, q, q)
        assert activation.calls == {"minimal_attn": 1} and active_name() is None
    nn.attention.activate_flash_attention_impl("minimal_attn")
    assert told(nn.attention.restore_flash_attention_impl)[0] == []


# ------------------------------------------------------------------------------------- masks


@pytest.fixture
def as_by_default():
    """conftest.py asks for deterministic algorithms, with which PyTorch never takes cuDNN's kernel."""
    torch.use_deterministic_algorithms(False)


MASKS = {  # of a bool mask with hidden rows
    "bool": lambda hidden, randn, dtype: ~hidden,
    "bias": lambda hidden, randn, dtype: randn(*hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf),
    "float32": lambda hidden, randn, dtype: randn(*hidden.shape).masked_fill(hidden, -torch.inf),
    "large float32": lambda hidden, randn, dtype: MASKS["float32"](hidden, randn, dtype) + 1000,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "shape", [(2, 4, 50, 70), (2, 1, 50, 70), (50, 64), (2, 1, 1, 70), (2, 1, 50, 1)], ids=str
)
@pytest.mark.parametrize("Hkv", [2, 4])
@pytest.mark.parametrize("path", ["activated", "cuDNN alone", "function", "compiled"])
def test_masked_calls(as_by_default, randn, device, generator, dtype, kind, shape, Hkv, path):
    """Rows that see no key are 0, the rest is right. cuDNN's kernel, the first choice on Hopper, is wrong."""
    if path == "cuDNN alone" and (device == "cpu" or dtype == torch.float32):
        pytest.skip("not a kernel of this device and dtype")
    if path == "compiled" and (shape != (2, 1, 50, 70) or Hkv != 4):
        pytest.skip("one shape suffices")
    if device == "cuda" and dtype == torch.float32 and shape[-1] == 1:
        pytest.skip("PyTorch's memory-efficient kernel refuses a mask of one column (torch 2.11)")
    Nk = 64 if shape == (50, 64) else 70
    tensors = [randn(2, H, N, 64, dtype=dtype).requires_grad_() for H, N in ((4, 50), (Hkv, Nk), (Hkv, Nk))]
    hidden = (torch.rand(shape, generator=generator) < 0.3).to(device)
    hidden[0 if shape[-2] == 1 else ..., 0, :] = True  # a row, or where rows share the mask, a batch
    if kind == "large float32" and (dtype == torch.float32 or shape[-1] == 1):
        pytest.skip("float32 scores lose digits, too; and one number a row changes nothing")
    mask = MASKS[kind](hidden, randn, dtype)
    weight = randn(2, 4, 50, 64, dtype=dtype)
    options = {"enable_gqa": Hkv < 4}

    def both_passes(function, tensors, mask):
        o = function(*tensors, attn_mask=mask, **options)
        return o, *torch.autograd.grad(o, tensors, weight.to(o.dtype))

    with sdpa_kernel(SDPBackend.MATH):
        exact = [t.detach().double().requires_grad_() for t in tensors]
        expected = both_passes(
            F.scaled_dot_product_attention, exact, mask if mask.dtype == torch.bool else mask.double()
        )
    is_function = path == "function"
    function = minimal_attn.scaled_dot_product_attention if is_function else F.scaled_dot_product_attention
    if path == "compiled":
        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with contextlib.ExitStack() as stack:
        activation = None if is_function else stack.enter_context(minimal_attn.activate())
        if path == "cuDNN alone":
            stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
        try:
            actual = both_passes(function, tensors, mask)
            with torch.no_grad():
                o = function(*tensors, attn_mask=mask, **options)
        except RuntimeError as error:
            has_no_kernel = "No viable backend" in str(error) or "No available kernel" in str(error)
            if path != "cuDNN alone" or not has_no_kernel:
                raise
            pytest.skip("cuDNN has no kernel here")
    rows = hidden.expand(2, 4, 50, Nk).all(-1)
    assert rows.any() and actual[0][rows].eq(0).all() and actual[1][rows].eq(0).all() and o[rows].eq(0).all()
    check(o, expected[0], dtype)
    for x, y in zip(actual, expected, strict=True):
        check(x, y, dtype, factor=3 if x is actual[0] else 6)
    is_served = minimal_attn._C.has_fast_pairs(tensors[0])
    assert is_function or ("minimal_attn" in activation.calls) == is_served


def test_masked_calls_in_many_ways(as_by_default, randn, device):
    """autocast, vmap, dropout and a bias that is differentiated."""
    q, k, v = heads(randn, torch.float32)
    seen = torch.ones(50, 70, dtype=torch.bool, device=device)
    seen[3] = False

    def by_autocast(function):
        with torch.autocast(device, torch.bfloat16):
            o = function(q, k, v, attn_mask=seen)
        check(o, F.scaled_dot_product_attention(q.double(), k.double(), v.double(), seen), torch.bfloat16)
        return o

    def by_vmap(function):
        a, b, c = (t.bfloat16().unsqueeze(0).expand(3, -1, -1, -1, -1) for t in (q, k, v))
        return torch.vmap(lambda q, k, v: function(q, k, v, attn_mask=seen))(a, b, c)

    def by_dropout(function):
        a, b = q.half(), k.half()
        o = function(a, b, torch.ones_like(b), attn_mask=seen, dropout_p=0.5)
        assert abs(o.float().mean() - 49 / 50) < 0.05
        return o

    def by_bias(function):
        a, b, c = q.half(), k.half(), v.half().requires_grad_()  # for a bias alone PyTorch 2.11 keeps no lse
        bias = randn(50, 70, dtype=torch.float16).masked_fill(~seen, -torch.inf).requires_grad_()
        o = function(a, b, c, attn_mask=bias)
        [found] = torch.autograd.grad(o.float().square().sum(), bias)
        exact = bias.detach().double().requires_grad_()
        expected = F.scaled_dot_product_attention(a.double(), b.double(), c.double(), exact)
        [expected] = torch.autograd.grad(expected.square().sum(), exact)
        assert (found.double() - expected).norm() <= 1e-2 * expected.norm()
        return o

    def by_vmap_of_grad(function):
        a, b, c = (t.bfloat16().unsqueeze(0).expand(3, -1, -1, -1, -1) for t in (q, k, v))
        return torch.vmap(torch.func.grad(lambda q, k, v: function(q, k, v, attn_mask=seen).float().sum()))(
            a, b, c
        )

    for run in by_autocast, by_vmap, by_vmap_of_grad, by_dropout, by_bias:
        with minimal_attn.activate():
            assert run(F.scaled_dot_product_attention)[..., 3, :].eq(0).all(), run
        assert run(minimal_attn.scaled_dot_product_attention)[..., 3, :].eq(0).all(), run


@pytest.mark.parametrize("masked", [False, True])
def test_operator(randn, device, masked):
    """What it passes on is PyTorch's, under torch.compile, torch.vmap, autocast, inference mode, too."""
    function = torch.ops.minimal_attn.scaled_dot_product_attention
    ours = lambda q, k, v, mask: minimal_attn.forward(q, k, v, attn_mask=mask)  # noqa: E731
    expected = F.scaled_dot_product_attention if masked and device == "cuda" else ours
    q = randn(3, 4, 50, 64)
    mask = randn(50, 50) if masked else None
    assert torch.equal(function(q, q, q, mask), expected(q, q, q, mask))
    with torch.inference_mode():
        assert torch.equal(function(q, q, q, mask), expected(q, q, q, mask))
    with torch.autocast(device, torch.bfloat16):
        o = function(q, q, q, mask)
        assert o.dtype == torch.bfloat16 and torch.equal(o, expected(q, q, q, mask))

    def by_vmap(function):
        return torch.vmap(lambda x: function(x, x, x, mask))(q.unsqueeze(1))

    if not (
        masked and device == "cuda"
    ):  # PyTorch's memory-efficient kernel refuses such a mask under vmap (2.11)
        torch.testing.assert_close(by_vmap(function), by_vmap(expected))
    torch.compiler.reset()
    leaf = q.clone().requires_grad_()
    for run in function, torch.compile(function, fullgraph=True, backend="aot_eager"):
        found, plain = (
            torch.autograd.grad(f(leaf, leaf, leaf, mask).sum(), leaf)[0] for f in (run, expected)
        )
        assert torch.equal(found, plain)
