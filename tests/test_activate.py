"""F.scaled_dot_product_attention by these kernels: minimal_attn.activate()."""

import contextlib
import copy
import itertools
import subprocess
import sys
import threading

import pytest
import torch
from activation import HAS_REGISTRY, active_name, check, ends_inactive, heads  # noqa: F401
from conftest import DTYPES
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal_attn

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::minimal_attn.FallbackWarning"
)


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
    """Float64, on a GPU masks and dropout, reach PyTorch's kernels: the same bits, and counts."""
    q, k, v = heads(randn, torch.float32)
    mask = randn(50, 70)
    calls = {
        "PyTorch: attn_mask is given": lambda: F.scaled_dot_product_attention(q, k, v, mask),
        "PyTorch: the dtype is not float32, float16 or bfloat16": lambda: F.scaled_dot_product_attention(
            q.double(), k.double(), v.double()
        ),
        "PyTorch: a head dimension above 512 (in float32 on a GPU 256)": lambda: (
            F.scaled_dot_product_attention(*(t.repeat(1, 1, 1, 9) for t in (q, k, v)))
        ),
    }
    if device == "cuda":
        calls.pop(
            "PyTorch: the dtype is not float32, float16 or bfloat16"
        )  # there PyTorch has no fused kernel
    else:
        del calls["PyTorch: attn_mask is given"]  # it is served
    expected = [call() for call in calls.values()]
    with minimal_attn.activate() as activation:
        actual = [call() for call in calls.values()]
        torch.manual_seed(1)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert all(map(torch.equal, actual, expected))
    torch.manual_seed(1)
    if device == "cpu":  # it is served
        assert torch.equal(dropped, minimal_attn.forward(q, k, v, dropout_p=0.5))
    else:
        assert torch.equal(dropped, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert activation.calls.items() >= dict.fromkeys(calls, 1).items()
    assert activation.calls.get("minimal_attn", 0) == (device == "cpu")


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
        mask = randn(5, 7)
        if torch.device(device).type == "cpu":
            with pytest.raises(NotImplementedError, match="forward AD"):
                torch.func.jvp(lambda mask: function(q, k, v, mask), (mask,), (mask,))
        with sdpa_kernel(SDPBackend.MATH):
            torch.func.jvp(lambda mask: function(q, k, v, mask), (mask,), (mask,))
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
