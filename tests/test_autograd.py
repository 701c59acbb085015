"""forward under PyTorch's autograd: lse, states and sinks, torch.func, compile, checkpoints, autocast."""

import pytest
import torch
from reference import gradients, relative_error
from torch import library
from torch.utils.checkpoint import checkpoint

import minimal_attn

BOUND = 5e-6  # float32's relative error


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def close(actual, expected, bound=BOUND):
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape and relative_error(x.double(), y.double()) < bound


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_of_them(backend, name):
    """The same bits where only one input requires grad."""
    tensors = dict(zip("qkv", backend.qkv(), strict=True))
    do = torch.randn_like(tensors["q"])
    inputs = {x: t.detach().requires_grad_() for x, t in tensors.items()}
    expected = torch.autograd.grad(backend.forward(**inputs), list(inputs.values()), do)["qkv".index(name)]
    [alone] = leaves(tensors[name])
    assert torch.equal(*torch.autograd.grad(backend.forward(**tensors | {name: alone}), alone, do), expected)


def test_grad_mode(backend):
    """What records nothing gives the same values, which don't require grad."""
    q, k, v = leaves(*backend.qkv())
    expected = backend.forward(q, k, v)
    assert expected.requires_grad and not backend.forward(q.detach(), k.detach(), v.detach()).requires_grad
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            actual = backend.forward(q, k, v)
        assert not actual.requires_grad
        close([actual], [expected.detach()])  # hopper's bits may differ where it stores lse, too


@pytest.mark.parametrize("which", ["o", "lse", "both"])
def test_lse(backend, which):
    q, k, v = backend.qkv()
    do = torch.randn_like(q) * (which != "lse")
    dlse = backend.randn(2, 4, 70) * (which != "o")
    inputs = leaves(q, k, v)
    o, lse = backend.forward(*inputs, causal=True, return_lse=True)
    outputs = {"o": [o], "lse": [lse], "both": [o, lse]}[which]
    actual = torch.autograd.grad(outputs, inputs, {"o": [do], "lse": [dlse], "both": [do, dlse]}[which])
    exact = gradients(do, q, k, v, dlse=dlse, causal=True)
    close(actual[:2], exact[:2])
    if which == "lse":
        assert not actual[2].any()
    else:
        close(actual[2:], exact[2:])


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("returns", [{}, {"return_lse": True}, {"return_state": True}], ids=str)
def test_sinks(backend, shape, returns):
    q, k, v = backend.qkv()
    do, sinks = torch.randn_like(q), backend.randn(*shape)
    inputs = leaves(q, k, v, sinks)
    o = backend.forward(*inputs[:3], sinks=inputs[3], causal=True, offset=-30, **returns)
    o = o[0] if returns else o
    options = dict(sinks=sinks, causal=True, offset=-30)
    close(torch.autograd.grad(o, inputs, do), gradients(do, q, k, v, wanted=["sinks"], **options))


@pytest.mark.parametrize("wanted", ["q", "sinks"])
@pytest.mark.parametrize("returns", [{}, {"return_lse": True}], ids=str)
def test_gradients_of_sinks_can_be_differentiated(backend, returns, wanted):
    """They are plain operations on o and lse, whose gradients are known."""
    q, k, v = backend.randn(3, 1, 4, 9, 16)
    sinks, w = backend.randn(4), backend.randn(1, 4, 9, 16)

    def second(o, q, sinks):
        [first] = torch.autograd.grad((o * w.to(o.dtype)).sum(), sinks, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q if wanted == "q" else sinks)[0]

    q1, s1 = leaves(q, sinks)
    o = backend.forward(q1, k, v, sinks=s1, **returns)
    q2, s2 = leaves(q.double(), sinks.double())
    scores = torch.cat([q2 @ k.double().mT / 4, s2[None, :, None, None].expand(1, 4, 9, 1)], -1)
    expected = second(scores.softmax(-1)[..., :-1] @ v.double(), q2, s2)
    close([second(o[0] if returns else o, q1, s1)], [expected], bound=5e-5)


def test_sinks_of_rows_without_keys(backend):
    """NaN in do of such a row doesn't reach the gradient of sinks."""
    q, k, v = backend.randn(3, 2, 4, 9, 16)
    do, inputs = backend.randn(2, 4, 9, 16), leaves(q, k, v, backend.randn(4))
    options = dict(seqlens_k=backend.ints(0, 5))
    exact = gradients(do, q, k, v, wanted=["sinks"], sinks=inputs[3].detach(), **options)
    do[0] = torch.nan
    close(torch.autograd.grad(backend.forward(*inputs[:3], sinks=inputs[3], **options), inputs, do), exact)


def test_state(backend):
    """Two chunks of keys: gradients reach the first one through its state, whose m is a constant."""
    q, k, v = backend.qkv(Nq=100, Nk=200)
    do, dlse = torch.randn_like(q), backend.randn(2, 4, 100)
    inputs = leaves(q, k, v)
    q_, k_, v_ = inputs
    first = backend.forward(q_, k_[:, :, :70], v_[:, :, :70], causal=True, offset=-5, return_state=True)
    o, l, m = backend.forward(q_, k_[:, :, 70:], v_[:, :, 70:], causal=True, offset=-75, state=first)
    assert l.requires_grad and not m.requires_grad
    seen = l > 0
    loss = (o * do).sum() + ((m + l.log())[seen] * dlse[seen]).sum()
    close(torch.autograd.grad(loss, inputs), gradients(do, q, k, v, dlse=dlse, causal=True, offset=-5))


def test_merge(backend):
    """Through merge, whose weights depend on l."""
    q, k, v = backend.qkv(Nk=200)
    do = torch.randn_like(q)
    inputs = leaves(q, k, v)
    q_, k_, v_ = inputs
    parts = [(0, 70), (70, 71), (71, 200)]
    states = (backend.forward(q_, k_[:, :, i:j], v_[:, :, i:j], return_state=True) for i, j in parts)
    close(torch.autograd.grad(minimal_attn.merge(*states)[0], inputs, do), gradients(do, q, k, v))


def test_earlier_state(backend):
    """Its own gradients, against float64; empty rows, and rows that count for nothing but hold NaN."""
    q, k, v = backend.qkv()
    o, l, m = backend.forward(*backend.qkv(), causal=True, offset=-30, return_state=True)
    o[:, :, :3] = torch.nan  # l = 0 there
    do, dlse = torch.randn_like(q), backend.randn(2, 4, 70)
    state = leaves(o, l, m)
    new_o, new_lse = backend.forward(q, k, v, state=state, return_lse=True)
    actual = torch.autograd.grad([new_o, new_lse], state, [do, dlse])

    exact = [t.detach().double().requires_grad_() for t in (o, l, m)]
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 8
    lse_in = (exact[2] + exact[1].log()).masked_fill(l == 0, -torch.inf)[..., None]
    p = torch.cat([scores, lse_in], -1).softmax(-1)
    values = exact[0].masked_fill(l[..., None] == 0, 0)
    o64 = p[..., :-1] @ v.double().repeat_interleave(2, 1) + p[..., -1:] * values
    lse64 = torch.cat([scores, lse_in], -1).logsumexp(-1)
    expected = torch.autograd.grad([o64, lse64], exact, [do.double(), dlse.double()])
    close(actual, [t.nan_to_num(0) for t in expected])


def test_second_derivative_is_refused(backend):
    inputs = leaves(*backend.qkv())
    [dq] = torch.autograd.grad(backend.forward(*inputs).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="^minimal_attn has no second derivatives"):
        dq.sum().backward()


def test_pages_are_refused(backend):
    q, k, v = backend.qkv()
    for name in "qkv":
        inputs = dict(q=q, k=k, v=v) | {name: dict(q=q, k=k, v=v)[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"^{name} must not require grad where block_table is given"):
            backend.forward(**inputs, block_table=backend.ints(1, 0).view(2, 1))


def test_out_is_refused(backend):
    q, k, v = backend.qkv()
    for name, change in ("q", dict(q=q.clone().requires_grad_())), ("out", {}):
        options = dict(q=q, k=k, v=v, out=torch.zeros_like(q, requires_grad=name == "out")) | change
        text = f"^{name} must not require grad where out is given, but does: .*no_grad"
        with pytest.raises(RuntimeError, match=text):
            backend.forward(**options)
        with torch.no_grad():
            backend.forward(**options)


def test_torch_func(backend):
    """grad, and grad for each element of a batch."""
    q, k, v = (t.unflatten(0, (2, 3)) for t in backend.qkv(B=6))

    def loss(q, k, v):
        return backend.forward(q, k, v, causal=True).square().sum()

    def by_autograd(*tensors):
        inputs = leaves(*tensors)
        return torch.autograd.grad(loss(*inputs), inputs)

    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    expected = [by_autograd(*tensors) for tensors in zip(q, k, v, strict=True)]
    assert all(map(torch.equal, grad(q[0], k[0], v[0]), expected[0]))
    close(torch.vmap(grad)(q, k, v), map(torch.stack, zip(*expected, strict=True)))


def block(backend, x, weight, **options):
    B, N, width = x.shape
    q, k, v = (x @ weight).view(B, N, 3, 4, -1).permute(2, 0, 3, 1, 4)
    return backend.forward(q, k, v, causal=True, **options).transpose(1, 2).reshape(B, N, width)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step(backend, dynamic):
    x, weight = leaves(backend.randn(2, 50, 64), backend.randn(64, 192) / 8)
    length = backend.ints(50, 33)

    def step(x, weight):
        return torch.nn.functional.gelu(block(backend, x, weight, seqlens_k=length)).square().mean()

    expected = torch.autograd.grad(step(x, weight), (x, weight))
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    close(torch.autograd.grad(compiled(x, weight), (x, weight)), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(backend, use_reentrant):
    x, weight = leaves(backend.randn(2, 50, 64), backend.randn(64, 192) / 8)
    expected = torch.autograd.grad(block(backend, x, weight).sum(), (x, weight))
    y = checkpoint(lambda *args: block(backend, *args), x, weight, use_reentrant=use_reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_autocast(backend):
    """Gradients in the dtype of the leaves."""
    x, weight = leaves(backend.randn(2, 50, 64), backend.randn(64, 192) / 8)
    exact = torch.autograd.grad(block(backend, x, weight).sum(), (x, weight))
    with torch.autocast(backend.device.type, dtype=torch.bfloat16):
        y = block(backend, x, weight)
    assert y.dtype == torch.bfloat16
    close(torch.autograd.grad(y.sum(), (x, weight)), exact, bound=2e-2)


def test_saved_tensors(backend):
    """Hooks get them, and none has more than O(N d) elements."""
    largest = {}
    for N in 64, 512:
        inputs, sizes = leaves(*backend.qkv(Nq=N, Nk=N)), []

        def pack(t, sizes=sizes):
            sizes.append(t.numel())
            return t.cpu()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(backend.device)):
            o = backend.forward(*inputs, causal=True)
        expected = torch.autograd.grad(backend.forward(*inputs, causal=True).sum(), inputs)
        assert all(map(torch.equal, torch.autograd.grad(o.sum(), inputs), expected))
        largest[N] = max(sizes)
    assert largest[512] == 8 * largest[64] == 2 * 4 * 512 * 64


def test_order_of_saved_tensors(backend):
    """Hooks that number them see forward's order, whatever compiler built it."""
    q, k, v = leaves(*backend.qkv(B=2))
    bounds = [backend.ints(*numbers) for numbers in ((40, 30), (1, 2), (3, 4))]
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        backend.forward(q, k, v, causal=True, seqlens_k=bounds[0], leftpad_k=bounds[1], offset=bounds[2])
    assert [t.data_ptr() for t in seen[:6]] == [t.data_ptr() for t in (q, k, v, *bounds)]


def test_compiled_autograd(backend):
    """Of a compiled forward pass; an eager one is refused in PyTorch's words."""

    def loss(q, k, v):
        return backend.forward(q, k, v, causal=True).square().sum()

    inputs = leaves(*backend.qkv())
    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch._dynamo.compiled_autograd._enable(torch.compile(fullgraph=True, backend="aot_eager")):
        compiled(*inputs).backward()
        with pytest.raises(RuntimeError, match="compiled_args not implemented: MinimalAttnBackward"):
            loss(*inputs).backward()
    close([t.grad for t in inputs], expected)


def test_in_place_change_is_found(backend):
    q, k, v = leaves(*backend.qkv())
    k2 = k * 1
    o = backend.forward(q, k2, v)
    k2 += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


OPCHECKS = {
    "default": dict(causal=True),
    "lse": dict(window_size=(20, 3)),
    "state": {},
    "earlier state": {},
    "sinks": {},
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(backend, name):
    """Autograd's registration, and compiled gradients with sizes that change."""
    options = dict(OPCHECKS[name])
    op = torch.ops.minimal_attn.forward
    op = {"lse": op.lse, "state": op.state, "earlier state": op.state}.get(name, op.default)
    if name == "earlier state":
        state = backend.forward(*backend.qkv(), return_state=True)
        options |= dict(zip("olm", leaves(*state), strict=True))
    if name == "sinks":
        [options["sinks"]] = leaves(backend.randn(4))
    library.opcheck(op, leaves(*backend.qkv()), options)


def test_opcheck_of_backward(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    o, lse = backend.forward(q, k, v, causal=True, return_lse=True)
    arguments = [torch.randn_like(q), q, k, v, o, lse, None]
    op = torch.ops.minimal_attn.backward.default
    library.opcheck(op, arguments, dict(causal=True))
    arguments[6] = torch.randn_like(lse)
    tokens_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in arguments[:5]]
    options = dict(seqlens_k=backend.ints(33, 90), out_dtype=torch.float32)
    library.opcheck(op, tokens_first + arguments[5:], options)


def test_flop_counter(backend):
    """As PyTorch counts SDPA's backward pass: 5 products."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = leaves(*backend.qkv())
    o = backend.forward(q, k, v)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == 10 * 2 * 4 * 70 * 90 * 64
    bias = backend.randn(70, 90).requires_grad_()
    o = backend.forward(q, k, v, bias=bias)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == 10 * 2 * 4 * 70 * 90 * 64
