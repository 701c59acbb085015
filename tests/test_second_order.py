"""minimal_attn.second_order: gradients of gradients and forward mode, by float64 autograd."""

import pytest
import torch
from reference import attention, relative_error, visible_keys
from test_backward import ERROR_BOUND, OPTIONS

import minimal_attn
from minimal_attn import second_order

MASKS = {
    **{name: make for name, make in OPTIONS.items() if name not in ("dlse",)},
    "key_ranges": lambda b: dict(key_ranges=b.integers(-9, 99, 2, 70, 2, dtype=torch.int64)),
    "documents": lambda b: dict(
        cu_seqlens_q=b.ints(3, 20, 20, 60), cu_seqlens_k=b.ints(0, 30, 33, 85), causal=True
    ),
    "documents, prefix_k": lambda b: dict(
        cu_seqlens_q=b.ints(0, 30, 70),
        cu_seqlens_k=b.ints(0, 45, 90),
        window_size=(7, 2),
        prefix_k=b.ints(5, 0),
    ),
}


def drawn(backend, name, dtype=torch.float32):
    """q, k, v and options, whose sinks go with the tensors."""
    options = MASKS[name](backend)
    B = 1 if "cu_seqlens_q" in options else 2
    tensors = dict(zip("qkv", backend.qkv(B=B, d=24, dtype=dtype), strict=True))
    if "sinks" in options:
        tensors["sinks"] = options.pop("sinks")
    return tensors, options


def of_reference(tensors, options):
    found = attention(**tensors, **options)
    blind = found.l == 0
    return found.o, (found.m + found.l.masked_fill(blind, 1).log()).masked_fill(blind, 0)


def penalty(function, tensors, options, weight):
    """The gradient of a sum of squared first gradients, as a loss with a gradient penalty has it."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o, lse = function(leaves, options)
    loss = (o * weight.to(o.dtype)).sum() + 0.3 * lse.sum()
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    second = torch.autograd.grad(sum(g.double().square().sum() for g in first), list(leaves.values()))
    return [o, *first, *second]


def ours(backend):
    def run(tensors, options):
        o, lse = second_order.forward(**tensors, **options, return_lse=True)
        return o, lse.masked_fill(lse == -torch.inf, 0)

    return run


@pytest.mark.parametrize("name", MASKS)
def test_gradient_penalty(backend, dtype, name):
    tensors, options = drawn(backend, name, dtype)
    weight = backend.randn(*tensors["q"].shape)
    found = penalty(ours(backend), tensors, options | dict(backend=backend.name), weight)
    exact = penalty(of_reference, {n: x.double() for n, x in tensors.items()}, options, weight)
    for x, y in zip(found, exact, strict=True):
        assert (x.double() - y).norm() <= 4 * ERROR_BOUND[dtype] * max(y.norm(), 1)


@pytest.mark.parametrize("name", MASKS)
def test_first_gradients_are_those_of_the_kernels(backend, dtype, name):
    tensors, options = drawn(backend, name, dtype)
    weight, results = backend.randn(*tensors["q"].shape).to(dtype), []
    for function in minimal_attn.forward, second_order.forward:
        leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        o, lse = function(**leaves, **options, backend=backend.name, return_lse=True)
        results.append([o, lse, *torch.autograd.grad((o * weight).sum(), [leaves[n] for n in "qkv"])])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_is_the_contracts(backend, name):
    """For sizes that are drawn, and lengths beyond them."""
    options = MASKS[name](backend)
    for x in "sinks softmax_scale softcap alibi_slopes attn_mask bias dropout_p dropout_seed".split():
        options.pop(x, None)
    B = 1 if "cu_seqlens_q" in options else 2
    found = second_order.visible(B, 70, 90, backend.device, **options)
    assert torch.equal(found.expand(B, 1, 70, 90), visible_keys(B, 70, 90, **options).to(found.device))


@pytest.mark.parametrize("name", ["full", "causal, empty rows", "sinks", "lengths", "documents"])
def test_forward_mode(backend, name):
    tensors, options = drawn(backend, name)
    names = list(tensors)
    tangents = tuple(torch.randn_like(x) for x in tensors.values())

    def run(function, dtype):
        def call(*values):
            return function(dict(zip(names, values, strict=True)), options)

        pair = [tuple(x.to(dtype) for x in each) for each in (tensors.values(), tangents)]
        return torch.func.jvp(call, *pair)

    for x, y in zip(run(ours(backend), torch.float32), run(of_reference, torch.float64), strict=True):
        for one, other in zip(x, y, strict=True):
            assert relative_error(one.double(), other) < 1e-5


def test_gradcheck():
    """float64, both orders and forward mode."""
    tensors = [torch.randn(1, H, N, 3, dtype=torch.float64) for H, N in ((2, 4), (1, 5), (1, 5))]
    inputs = [x.requires_grad_() for x in (*tensors, torch.randn(2, dtype=torch.float64))]
    for options in {}, dict(causal=True, offset=0), dict(window_size=(1, 1), prefix_k=torch.tensor([1])):

        def call(q, k, v, sinks, options=options):
            return second_order.forward(q, k, v, sinks=sinks, return_lse=True, **options)

        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, inputs)


def test_hessian(backend):
    """Forward over reverse, and reverse over reverse."""
    q, k, v = backend.qkv(B=1, Hq=1, Hkv=1, Nq=2, Nk=3, d=4)

    def loss(k):
        return second_order.forward(q.to(k.dtype), k, v.to(k.dtype), backend=name).square().sum()

    name = backend.name
    found = torch.func.hessian(loss)(k), torch.func.jacrev(torch.func.jacrev(loss))(k)
    exact = torch.func.hessian(loss)(k.double())
    for x in found:
        assert relative_error(x.double(), exact) < 1e-5


def test_what_is_refused(backend):
    q, k, v = backend.qkv()
    with pytest.raises(TypeError, match="^second_order.forward.. got an unexpected .* 'state'"):
        second_order.forward(q, k, v, state=None)
    with pytest.raises(ValueError, match="^window_size must be"):
        second_order.forward(q, k, v, window_size=(-2, 3))


def test_lengths_that_change_before_the_backward_pass_are_refused(backend):
    q, k, v = (x.requires_grad_() for x in backend.qkv())
    lengths = backend.ints(50, 60)
    o = second_order.forward(q, k, v, seqlens_k=lengths)
    lengths += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_vmap(backend):
    q, k, v = (backend.randn(3, 1, 2, 20, 8) for _ in "qkv")
    lengths = backend.ints(20, 3, 9).view(3, 1)

    def loss(q, k, v, n):
        return second_order.forward(q, k, v, seqlens_k=n, backend=backend.name).square().sum()

    def norm(*inputs):
        return torch.func.grad(loss)(*inputs).square().sum()

    for function in loss, torch.func.grad(loss), torch.func.grad(norm):
        found = torch.vmap(function)(q, k, v, lengths)
        for n, x in enumerate(found):
            torch.testing.assert_close(x, function(q[n], k[n], v[n], lengths[n]), rtol=1e-4, atol=1e-5)
