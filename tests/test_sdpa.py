"""minimal_attn.scaled_dot_product_attention: PyTorch's function of this name."""

import pytest
import torch
from activation import check, ends_inactive, passed_on  # noqa: F401
from conftest import DTYPES
from torch.nn import functional as F

import minimal_attn

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::minimal_attn.FallbackWarning"
)

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
    ((2, 4, 50, 24), (2, 2, 70, 24), (2, 2, 70, 40), True),
    ((2, 3, 4, 50, 16), (2, 3, 4, 70, 16), (2, 3, 4, 70, 8), False),
    ((50, 16), (70, 16), (70, 1), False),
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


@pytest.mark.parametrize("i", range(9))
def test_passed_on(randn, i):
    if i >= len(cases := passed_on(randn)):
        pytest.skip("served on this device")
    why, tensors, options = cases[i]
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
            if has_dropout and device == "cpu" and dtype != torch.float64:
                continue  # other weights are dropped
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
