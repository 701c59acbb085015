"""What fuzz.py puts in the place of an argument: what must be refused, or may be."""

import contextlib
from fractions import Fraction

import numpy
import torch

import minimal_attn

KEYWORDS = list(minimal_attn.forward.__kwdefaults__)
DTYPES = torch.float32, torch.float16, torch.bfloat16


def replace(call):
    """Another value for one argument, which must be refused or may be."""
    name = call.choice("q", "k", "v", *KEYWORDS, "unknown")
    kinds = {
        "q": bad_tensor,
        "k": bad_tensor,
        "v": bad_tensor,
        "seqlens_k": bad_ints,
        "leftpad_k": bad_ints,
        "offset": bad_ints,
        "causal": bad_bool,
        "return_state": bad_bool,
        "return_lse": bad_bool,
        "window_size": bad_window_size,
        "softmax_scale": bad_scale,
        "state": bad_state,
        "sinks": bad_sinks,
        "out": bad_out,
        "block_table": bad_table,
        "key_ranges": bad_ranges,
        "cu_seqlens_q": bad_cu_seqlens,
        "cu_seqlens_k": bad_cu_seqlens,
        "prefix_k": bad_prefix,
        "softcap": bad_scale,
        "alibi_slopes": bad_sinks,
        "attn_mask": bad_pairs,
        "bias": bad_pairs,
        "dropout_p": bad_dropout,
        "dropout_seed": bad_seed,
        "seqused_k": bad_seqused,
        "backend": bad_backend,
        "unknown": bad_keyword,
    }
    kinds[name](call, name)


def set_argument(call, name, value, *, wrong=True):
    call.arguments[name] = value
    call.wrong.discard(name)
    call.perhaps.discard(name)
    (call.wrong if wrong else call.perhaps).add(name)


def no_tensor(call):
    return call.choice(
        [1, 2], "tensor", 3, 2.5, object(), {}, numpy.zeros(3), b"", 1j, torch.float32, torch.Tensor, ...,
        10**400, float("nan"), True, (), slice(None), range(3), lambda: 0,
    )  # fmt: skip


def other_layout(call, t):
    """The same elements, but not as a dense tensor of real numbers with its memory."""

    def emptied():
        copy = t.clone(memory_format=torch.contiguous_format)
        copy.untyped_storage().resize_(0)
        call.is_final = True
        return copy

    kinds = [
        lambda: t.to_sparse(),
        lambda: t.to("meta"),
        lambda: t.to(call.choice(torch.float64, torch.int64, torch.complex64, torch.bool, torch.uint8)),
        lambda: t.to(torch.float32).to(torch.float8_e4m3fn),
    ]
    q = call.arguments["q"]
    # forward refuses freed memory only if it would read it. Autocast reads it before, and crashes in PyTorch.
    if t.numel() and usual(q) and q.numel() and not call.perhaps | call.wrong and call.autocast is None:
        kinds.append(emptied)
    if call.device.type == "cpu":
        kinds.append(lambda: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8))
        if t.dtype != torch.float16 and t.numel():
            kinds.append(lambda: t.contiguous().to_mkldnn())
        if t.dim() >= 2 and t.shape[0] and t.numel():
            kinds.append(lambda: torch.nested.nested_tensor(list(t.contiguous()), layout=torch.strided))
    return call.choice(*kinds)()


def other_shape(call, t):
    shape = list(t.shape)
    kind = call.random.randrange(4)
    if kind == 0 and shape:
        del shape[call.random.randrange(len(shape))]
    elif kind == 1:
        shape.insert(call.random.randint(0, len(shape)), call.choice(0, 1, 2))
    elif shape:
        i = call.random.randrange(len(shape))
        shape[i] = call.choice(*({0, 1, 7, 257, shape[i] + 1, 2**28 if i == 2 else 2**45} - {shape[i]}))
    else:
        shape = [1]
    return call.zeros(*[1] * len(shape), dtype=t.dtype).expand(shape)


def usual(t):
    """What wasn't replaced yet."""
    return (
        isinstance(t, torch.Tensor) and t.layout == torch.strided and has_memory(t) and t.dim() == 4
        and max(t.shape) <= 300 and t.dtype in DTYPES
    )  # fmt: skip


def bad_tensor(call, name):
    t = call.arguments[name]
    if not usual(t):
        return
    t = t.as_subclass(torch.Tensor).resolve_neg()
    kind = call.random.randrange(5)
    if kind == 0:
        set_argument(call, name, call.choice(None, no_tensor(call)))
    elif kind == 1:
        other = other_layout(call, t)
        set_argument(call, name, other, wrong=call.autocast is None or not other.is_floating_point())
    elif kind == 2:
        set_argument(call, name, t.detach().clone().requires_grad_(), wrong=False)
        refused_with = [call.arguments.get(other) is not None for other in ("out", "block_table")]
        if call.context is contextlib.nullcontext and any(refused_with):
            call.wrong.add(name)
    else:
        # Another number of tokens may do for q, for one, and other heads.
        set_argument(call, name, other_shape(call, t), wrong=False)


def bad_ints(call, name):
    q = call.arguments["q"]
    if not usual(q):
        return
    B = q.shape[0]
    if name == "offset" and call.chance(0.5):
        wrong = 2**63, -(2**63) - 1, 10**40, 3.0, float("nan"), "3", (3,), [3], numpy.float64(3)
        perhaps = Fraction(3), True, numpy.int64(3), numpy.int8(-3), torch.tensor(3)
        is_wrong = call.chance(0.7)
        return set_argument(call, name, call.choice(*(wrong if is_wrong else perhaps)), wrong=is_wrong)
    if call.chance(0.3):
        value = no_tensor(call)
        return set_argument(call, name, value, wrong=not isinstance(value, (int, bool)))
    shape = call.choice((), (B + 1,), (B, 1), (1, B), (B,))
    dtypes = torch.float32, torch.bool, torch.uint64, torch.complex64, torch.float8_e5m2, torch.float16
    t = call.zeros(*shape, dtype=torch.int32 if shape != (B,) else call.choice(*dtypes))
    if call.chance(0.3):
        t = call.zeros(B, dtype=torch.int32, device="meta")
    set_argument(call, name, t)


def bad_cu_seqlens(call, name):
    if not usual(call.arguments["q"]):
        return
    if call.chance(0.3):
        return set_argument(call, name, no_tensor(call))
    shape = call.choice((), (2, 1), (0,), (7,))
    dtypes = torch.float32, torch.bool, torch.uint64, torch.complex64
    set_argument(call, name, call.zeros(*shape, dtype=call.choice(*dtypes) if shape == (7,) else torch.int32))


def bad_seqused(call, name):
    shape = call.choice((), (2, 1), (9,))
    set_argument(call, name, no_tensor(call) if call.chance(0.3) else call.zeros(*shape, dtype=torch.int32))


def bad_prefix(call, name):
    q = call.arguments["q"]
    if not usual(q):
        return
    B = q.shape[0]
    if call.chance(0.3):
        return set_argument(call, name, no_tensor(call))
    if call.chance(0.3) and call.device.type == "cpu" and q.numel() and "cu_seqlens_q" not in call.arguments:
        call.is_final = True  # without elements of q it isn't looked at
        return set_argument(call, name, torch.full((B,), call.choice(-1, -(2**31))))
    shape = call.choice((), (B + 9,), (9, 1), (B,))
    wrong_types = torch.float32, torch.bool, torch.uint64
    dtype = call.choice(*wrong_types) if shape == (B,) else torch.int32
    set_argument(call, name, call.zeros(*shape, dtype=dtype))


def bad_ranges(call, name):
    q = call.arguments["q"]
    if not usual(q):
        return
    if call.chance(0.3):
        return set_argument(call, name, no_tensor(call))
    B, _, Nq, _ = q.shape
    shape = call.choice((), (B + 2, Nq, 2), (B, Nq + 1, 2), (B, Nq, 3), (Nq, 2), (B, 2, Nq + 2), (B, Nq, 2))
    wrong_types = torch.float32, torch.bool, torch.uint64
    dtype = call.choice(*wrong_types) if shape == (B, Nq, 2) else torch.int32
    set_argument(call, name, call.zeros(*shape, dtype=dtype))


def bad_bool(call, name):
    if call.chance(0.5):
        return set_argument(call, name, call.choice(numpy.bool_(True), numpy.bool_(False)), wrong=False)
    set_argument(
        call,
        name,
        call.choice(None, 0, 1, "yes", [], 2.5, call.zeros(1), torch.zeros(2), object(), float("nan")),
    )


def bad_window_size(call, name):
    wrong = (
        (),
        (1,),
        (1, 2, 3),
        None,
        5,
        "ab",
        (1.5, 2),
        (2**63, 0),
        (-2, 0),
        (0, -(2**63)),
        [None, 1],
        {1: 2, 3: 4},
    )
    perhaps = (
        [3, 4],
        (True, False),
        (numpy.int64(3), 2),
        (torch.tensor(3), 1),
        torch.tensor([3, 4]),
        numpy.array([3, 4]),
        range(2),
    )
    is_wrong = call.chance(0.7)
    set_argument(call, name, call.choice(*(wrong if is_wrong else perhaps)), wrong=is_wrong)


def bad_scale(call, name):
    wrong = (
        float("nan"),
        float("inf"),
        -float("inf"),
        1e39,
        -1e300,
        10**400,
        "1",
        1j,
        [0.5],
        object(),
        (),
        b"1",
    )
    perhaps = (
        10**30,
        True,
        numpy.float32(0.5),
        numpy.int64(1),
        torch.tensor(0.5),
        Fraction(1, 2),
        numpy.array(0.5),
    )
    is_wrong = call.chance(0.7)
    set_argument(call, name, call.choice(*(wrong if is_wrong else perhaps)), wrong=is_wrong)


def bad_dropout(call, name):
    numbers = -0.1, -1e-300, 1.1, 2, -1, 1e300, 10**400, float("nan"), float("inf"), -float("inf")
    set_argument(call, name, call.choice(*numbers, "0.1", 1j, [0.5], object(), (), b"0", {}, numpy.ones(2)))


def bad_seed(call, name):
    """Beside a dropout_p, since nothing reads a seed without."""
    dtypes = torch.int32, torch.uint8, torch.float32, torch.float64, torch.bool
    seed = call.choice(
        lambda: no_tensor(call),
        lambda: torch.zeros(1, device=call.device, dtype=call.choice(*dtypes)),
        lambda: torch.zeros(call.choice((0,), (2,), (1, 3)), device=call.device, dtype=torch.int64),
        lambda: torch.zeros(1, device="meta", dtype=torch.int64),
        lambda: torch.zeros(1, 1, device=call.device, dtype=torch.int64).to_sparse(),
    )()
    set_argument(call, "dropout_p", 0.5, wrong=False)
    set_argument(call, name, seed)


def bad_state(call, name):
    q, v = call.arguments["q"], call.arguments["v"]
    if not usual(q) or not usual(v):
        return
    rows = q.shape[:3]
    o, l, m = call.zeros(*rows, v.shape[3]), call.zeros(*rows), call.zeros(*rows)
    state = [o, l, m]
    kind = call.random.randrange(5)
    if kind == 0:
        return set_argument(
            call, name, call.choice((), (o,), (o, l), (o, l, m, m), 3, "olm", {0: o, 1: l, 2: m})
        )
    if kind == 1:
        return set_argument(call, name, iter(state), wrong=False)
    i = call.random.randrange(3)
    state[i] = [
        lambda: call.choice(None, no_tensor(call)),
        lambda: other_layout(call, state[i]),
        lambda: state[i].unsqueeze(call.random.randint(0, state[i].dim())),
    ][kind - 2]()
    set_argument(call, name, call.choice(tuple, list)(state))


def bad_sinks(call, name):
    q = call.arguments["q"]
    if not usual(q):
        return
    B, Hq = q.shape[:2]
    t = call.zeros(Hq)
    kinds = [
        lambda: no_tensor(call),
        lambda: t.to(call.choice(torch.int32, torch.bool, torch.complex64)),
        lambda: t.to("meta"),
        lambda: call.zeros(B + 1, Hq),
        lambda: call.zeros(Hq + 1),
        lambda: call.zeros(),
        lambda: call.zeros(B, Hq, 1),
        lambda: t.to_sparse(),
    ]
    set_argument(call, name, call.choice(*kinds)())
    if name == "sinks" and isinstance(call.arguments.get("state"), tuple):
        call.wrong.add("state")


def bad_pairs(call, name):
    q, k = call.arguments["q"], call.arguments["k"]
    if not usual(q) or not usual(k):
        return
    t = call.zeros(q.shape[2], 1)
    kinds = [
        lambda: no_tensor(call),
        lambda: t.to(call.choice(torch.int32, torch.float64, torch.uint8, torch.complex64)),
        lambda: t.to("meta"),
        lambda: call.zeros(q.shape[2] + 2, 1),
        lambda: call.zeros(q.shape[1] + 2, 1, 1),
        lambda: call.zeros(1, 1, 1, 1, 1),
        lambda: t.to_sparse(),
    ]
    set_argument(call, name, call.choice(*kinds)())
    call.perhaps.update({"attn_mask", "bias"} - {name})


def bad_table(call, name):
    q = call.arguments["q"]
    if not usual(q):
        return
    B = q.shape[0]
    t = call.zeros(B, 2, dtype=torch.int32)
    kinds = [
        lambda: no_tensor(call),
        lambda: t.to(call.choice(torch.float32, torch.bool, torch.complex64, torch.uint64)),
        lambda: t.to("meta"),
        lambda: call.zeros(B + 1000, 2, dtype=torch.int32),  # further than another wrong q gets
        lambda: t[..., 0],
        lambda: t[None],
        lambda: t.to_sparse(),
    ]
    set_argument(call, name, call.choice(*kinds)())


def bad_out(call, name):
    q = call.arguments["q"]
    if not usual(q):
        return
    q = q.detach().as_subclass(torch.Tensor).resolve_neg()
    kinds = [
        lambda: no_tensor(call),
        lambda: call.arguments[call.choice("q", "k", "v")],
        lambda: other_layout(call, call.zeros(*q.shape, dtype=call.choice(torch.float32, q.dtype))),
        lambda: other_shape(call, q),
        lambda: torch._neg_view(torch.zeros_like(q)),
        lambda: torch.zeros_like(q).mT.contiguous().mT,
        lambda: (
            call.zeros(*q.shape, dtype=q.dtype)[:, :, :1].expand(q.shape)
            if q.numel()
            else torch.zeros_like(q)
        ),
        lambda: q.new_zeros(40000).as_strided(q.shape, (1, 1, 1, 1)),
    ]
    set_argument(call, name, call.choice(*kinds)(), wrong=False)
    for other in "return_lse", "return_state", "state":
        value = call.arguments.get(other)
        if value is True or isinstance(value, tuple):
            call.wrong.add(name)


def bad_backend(call, name):
    other = "portable" if call.device.type == "cpu" else "cpu"
    wrong = "", "gpu", "AUTO", other, "x" * 10**5, "\ud800", "é" * 30, None, 3, ["auto"], "auto\0", "cpu\n"
    set_argument(call, name, call.choice(*wrong, b"auto"))
    if call.arguments[name] == b"auto":
        call.wrong.discard(name)
        call.perhaps.add(name)


def bad_keyword(call, name):
    keyword = call.choice("is_causal", "scale", "mask", "dropout", "causal_", "x", "self", "é")
    set_argument(call, keyword, call.choice(True, None, 0.5))


def has_memory(t):
    return not (t.is_meta or t.is_nested or t.is_quantized) and (
        t.numel() == 0 or t.untyped_storage().nbytes() > 0
    )
