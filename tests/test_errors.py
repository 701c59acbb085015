"""Bad input: one line that names the argument, its value and what it must be; the next call is right."""

import re

import numpy
import pytest
import torch

import minimal_attn

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own


def refuses(backend, error, /, *patterns, **changes):
    """A good call but for `changes` raises `error`, in one line with all of `patterns`; the next is right.

    So does explain.
    """
    q, k, v = backend.qkv(B=2, Hq=4, Hkv=2, Nq=5, Nk=7, d=8)
    call = {"q": q, "k": k, "v": v, "backend": backend.name, **changes}
    for function in minimal_attn.forward, minimal_attn.explain:
        with pytest.raises(error) as caught:
            function(**call)
        message = str(caught.value)
        assert "\n" not in message.strip() and len(message) < 400, message
        for pattern in patterns:
            assert re.search(pattern, message), f"no {pattern!r} in {message!r}"
    backend.check(q, k, v)


def zeros(backend, *shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=backend.device)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rank(backend, name):
    for shape in (), (8,), (7, 8), (2, 7, 8), (2, 2, 1, 7, 8):
        refuses(
            backend,
            ValueError,
            rf"^{name} ",
            r"\(B, H, N, d\)",
            re.escape(str(list(shape))),
            **{name: zeros(backend, *shape)},
        )


@pytest.mark.parametrize(
    "wrong", [torch.float64, torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn]
)
def test_dtype(backend, wrong):
    tensors = {name: zeros(backend, 2, 2, 7, 8).to(wrong) for name in "qkv"}
    refuses(backend, ValueError, r"^q ", "float32, float16 or bfloat16", dtype_name(wrong), **tensors)


def dtype_name(dtype):
    """As C++ spells it, or Python."""
    spelt = {
        torch.float64: "Double|float64",
        torch.float16: "Half|float16",
        torch.bfloat16: "BFloat16|bfloat16",
        torch.int32: "Int|int32",
        torch.int64: "Long|int64",
        torch.uint64: "UInt64|uint64",
        torch.float32: "Float|float32",
        torch.complex64: "ComplexFloat|complex64",
        torch.bool: "Bool|bool",
        torch.float8_e4m3fn: "Float8_e4m3fn|float8_e4m3fn",
    }
    return rf"\b({spelt[dtype]})\b"


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("wrong", [torch.float16, torch.bfloat16, torch.float64])
def test_mixed_dtypes(backend, name, wrong):
    t = zeros(backend, 2, 2, 7, 8, dtype=wrong)
    refuses(backend, ValueError, rf"^{name} ", dtype_name(torch.float32), dtype_name(wrong), **{name: t})


@pytest.mark.parametrize("shape", [(3, 2, 7, 8), (1, 2, 7, 8), (2, 2, 7, 9), (2, 2, 7, 1)])
def test_k_that_does_not_fit_q(backend, shape):
    k = zeros(backend, *shape)
    refuses(backend, ValueError, "^k must", r"\(2, Hkv, Nk, 8\)", re.escape(str(list(shape))), k=k, v=k)


WRONG_V = [(3, 2, 7, 8), (2, 1, 7, 8), (2, 4, 7, 8), (2, 2, 6, 8), (2, 2, 7, 0), (2, 2, 7, 577)]


@pytest.mark.parametrize("shape", WRONG_V)
def test_v_that_does_not_fit_k(backend, shape):
    shapes = re.escape("(2, 2, 7, d_v)"), re.escape(str(list(shape)))
    refuses(backend, ValueError, "^v must", *shapes, v=zeros(backend, *shape))


@pytest.mark.parametrize("Hq, Hkv", [(3, 2), (4, 3), (2, 4), (1, 2), (4, 0)])
def test_heads(backend, Hq, Hkv):
    q, k = zeros(backend, 2, Hq, 5, 8), zeros(backend, 2, Hkv, 7, 8)
    refuses(backend, ValueError, r"^q ", "multiple", rf"\b{Hq}\b", rf"\b{Hkv}\b", q=q, k=k, v=k)


def test_heads_and_tokens_in_each_other_s_place(backend):
    """Where the shapes betray flash_attn's layout, or vLLM's of pages, the error says so."""
    q, k = zeros(backend, 2, 5, 4, 8), zeros(backend, 2, 7, 2, 8)
    todo = r"multiple .* q has 5 and k has 7; .*\(B, N, H, d\), as in flash_attn, pass x.transpose\(1, 2\)"
    refuses(backend, ValueError, todo, q=q, k=k, v=k)
    pages, table = zeros(backend, 3, 16, 2, 8), backend.ints(0, 1).view(2, 1)
    for x, hint in (q.transpose(1, 2), r"\(pages, page_size, Hkv, d\), as in vLLM"), (q, r"\(B, N, H, d\)"):
        wrong = dict(q=x, k=pages, v=pages, block_table=table)
        refuses(backend, ValueError, f"multiple .* and k has 16; .*{hint}.*transpose", **wrong)
    q, k = zeros(backend, 2, 3, 5, 8), zeros(backend, 2, 2, 7, 8)
    refuses(backend, ValueError, "q has 3 and k has 2$", q=q, k=k, v=k)


@pytest.mark.parametrize("above", [None, 1, 64, 256])
def test_head_dimension(backend, above):
    most = 576
    d = 0 if above is None else most + above
    q, k = zeros(backend, 2, 4, 5, d), zeros(backend, 2, 2, 7, d)
    refuses(backend, ValueError, r"^q ", f"1 to {most}", rf"\b{d}\b", q=q, k=k, v=k)


def test_device(backend):
    """Tensors of two devices, "meta" for one that is always there."""
    for name in "k", "v":
        refuses(
            backend,
            ValueError,
            rf"^{name} ",
            "device",
            "meta",
            **{name: zeros(backend, 2, 2, 7, 8).to("meta")},
        )
    for name in "seqlens_k", "leftpad_k", "offset":
        refuses(backend, ValueError, rf"^{name} ", "device", "meta", **{name: backend.ints(1, 2).to("meta")})


def test_cpu_and_cuda(cuda_backend):
    backend = cuda_backend
    for name in "k", "v":
        refuses(
            backend, ValueError, rf"^{name} ", "device", r"\bcpu\b", "cuda", **{name: torch.zeros(2, 2, 7, 8)}
        )
    for name in "seqlens_k", "leftpad_k", "offset":
        wrong = torch.zeros(2, dtype=torch.int32)
        refuses(backend, ValueError, rf"^{name} ", "device", r"\bcpu\b", "cuda", **{name: wrong})
    refuses(backend, ValueError, "^k ", "device", r"\bcpu\b", "cuda", q=torch.zeros(2, 4, 5, 8))


@pytest.mark.parametrize("name", ["seqlens_k", "leftpad_k", "offset"])
def test_one_int_a_batch(backend, name):
    for wrong in torch.float32, torch.bool, torch.uint64:
        t = zeros(backend, 2, dtype=wrong)
        refuses(backend, ValueError, rf"^{name} ", "int32 or another", dtype_name(wrong), **{name: t})
    for shape in (), (1,), (3,), (0,), (2, 1), (1, 2):
        t = zeros(backend, *shape, dtype=torch.int32)
        refuses(backend, ValueError, rf"^{name} ", r"\(B,\)", re.escape(str(list(shape))), **{name: t})
    for wrong in [3, 4], "3", 3.5, (1, 2), object():
        must_be = "int.*tensor" if name == "offset" else "tensor"
        refuses(backend, TypeError, rf"^{name} ", must_be, re.escape(str(wrong)), **{name: wrong})


NO_INTS = [2.0, 12.5, True, numpy.True_, numpy.float64(3), torch.tensor(2.0), torch.tensor(2, device="meta")]


@pytest.mark.parametrize("wrong", NO_INTS, ids=repr)
def test_what_is_no_int(backend, wrong):
    """Bools and floats; NumPy's ints and tensors of one integer are ints."""
    window = "^window_size must be two ints"
    refuses(backend, TypeError, window, window_size=(wrong, 3))
    refuses(backend, TypeError, window, window_size=(3, wrong))
    if not isinstance(wrong, torch.Tensor):
        refuses(backend, TypeError, "^offset must be an int of 64 bits", offset=wrong)
    refuses(backend, TypeError, "^softmax_scale must be a number", softmax_scale=True)
    q, k, v = backend.qkv()
    o, l, m = backend.forward(q, k, v, return_state=True)
    with pytest.raises(TypeError, match=window):
        minimal_attn.backward(o, q, k, v, o, l, m, window_size=(wrong, 3))
    for flag in "deterministic", "complete":
        with pytest.raises(TypeError, match=f"^{flag} must be True or False, but was 1"):
            minimal_attn.backward(o, q, k, v, o, l, m, **{flag: 1})


@pytest.mark.parametrize("number", [numpy.int64, numpy.int32, torch.tensor])
def test_numbers_of_numpy_and_tensors_of_one(backend, number):
    q, k, v = backend.qkv()
    expected = dict(window_size=(9, 3), offset=2, softmax_scale=2.0)
    same = dict(window_size=(number(9), number(3)), softmax_scale=number(2), offset=2)
    if number is not torch.tensor:
        same["offset"] = number(2)
    state = backend.forward(q, k, v, **expected, return_state=True)
    assert all(map(torch.equal, backend.forward(q, k, v, **same, return_state=True), state))
    gradients = [minimal_attn.backward(q, q, k, v, *state, **options) for options in (expected, same)]
    assert all(map(torch.equal, *gradients))


def test_offset_beyond_64_bits(backend):
    for wrong in 2**63, -(2**63) - 1, 10**30:
        refuses(backend, TypeError, r"^offset ", "int of 64 bits", str(wrong), offset=wrong)


@pytest.mark.parametrize("wrong", [(-2, 0), (0, -2), (-3, -3), (5, -(2**62))])
def test_window_size(backend, wrong):
    refuses(
        backend,
        ValueError,
        r"^window_size ",
        "left, right",
        "-1",
        str(wrong[0]),
        str(wrong[1]),
        window_size=wrong,
    )


@pytest.mark.parametrize("wrong", [(), (1,), (1, 2, 3), 5, None, (1.5, 2), ("a", "b"), "ab", (2**63, 0)])
def test_window_size_of_another_type(backend, wrong):
    refuses(backend, TypeError, r"^window_size ", "left, right", re.escape(str(wrong)), window_size=wrong)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_softmax_scale(backend, wrong):
    refuses(backend, ValueError, r"^softmax_scale ", "finite", str(wrong), softmax_scale=wrong)


@pytest.mark.parametrize(
    "name",
    [
        "softmax_scale",
        "causal",
        "return_state",
        "return_lse",
        "backend",
        "state",
        "sinks",
        "out",
        "q",
        "k",
        "v",
    ],
)
@pytest.mark.parametrize("wrong", ["wrong", [1, 2], {3: 4}, object()], ids=["str", "list", "dict", "object"])
def test_other_types(backend, name, wrong):
    if name == "backend" and isinstance(wrong, str):
        pytest.skip("a string is right")
    refuses(backend, TypeError, rf"^{name} must be ", re.escape(str(wrong)), **{name: wrong})


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_several_numbers(backend, name):
    for wrong in [1.0, 2.0], numpy.ones(2), numpy.zeros(2), torch.zeros(2), torch.ones(2, device="meta"):
        refuses(backend, TypeError, rf"^{name} must be a number or None, but was ", **{name: wrong})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_lists_and_arrays(backend, name):
    numbers = zeros(backend, 2, 2, 7, 8).cpu()
    refuses(backend, TypeError, rf"^{name} must be a dense tensor", "list", **{name: numbers.tolist()})
    refuses(backend, TypeError, rf"^{name} must be a dense tensor", "None", **{name: None})
    refuses(backend, TypeError, rf"^{name} must be a dense tensor", "torch.Tensor", **{name: torch.Tensor})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_sparse_and_quantized(backend, name):
    tensor = zeros(backend, 2, 2, 7, 8)
    for options in {}, {"dropout_p": 0.5}, {"dropout_p": -1}:  # a seed is drawn as q's device has it
        wrong = {name: tensor.to_sparse()}
        refuses(backend, TypeError, rf"^{name} must be a dense tensor", "sparse_coo", **wrong, **options)
    if backend.device.type == "cpu":
        quantized = torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
        todo = rf"^{name} must be a dense tensor, but was a quantized one, .*dequantize"
        refuses(backend, TypeError, todo, **{name: quantized})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(backend, layout):
    nested = torch.nested.nested_tensor([torch.zeros(7, 2, 8)] * 2, layout=layout, device=backend.device)
    todo = "was a nested one", "to_padded_tensor", "seqlens_k"
    for name in "q", "k", "v":
        for dropout_p in 0, 0.5:
            wrong = {name: nested.transpose(1, 2), "dropout_p": dropout_p}
            refuses(backend, TypeError, rf"^{name} must be a dense tensor", *todo, **wrong)


def test_sinks(backend):
    for shape in (), (3,), (2,), (1, 4), (4, 2), (2, 4, 1):
        wrong = zeros(backend, *shape)
        shapes = r"\(Hq,\) = \(4,\) or \(B, Hq\)", re.escape(str(list(shape)))
        refuses(backend, ValueError, "^sinks must have shape ", *shapes, sinks=wrong)
    for dtype in torch.int32, torch.bool, torch.complex64:
        wrong = zeros(backend, 4, dtype=dtype)
        refuses(backend, ValueError, "^sinks must be of a floating dtype", dtype_name(dtype), sinks=wrong)
    refuses(backend, ValueError, "^sinks must be on q's device", "meta", sinks=torch.zeros(4, device="meta"))
    state = state_of(backend)
    refuses(backend, ValueError, "^sinks must be None with a state", sinks=zeros(backend, 4), state=state)


def test_out(backend):
    for shape in (2, 4, 5), (2, 4, 5, 9), (2, 2, 5, 8), (1, 2, 4, 5, 8):
        wrong = zeros(backend, *shape)
        refuses(backend, ValueError, "^out must have shape", re.escape(str(list(shape))), out=wrong)
    for dtype in torch.float16, torch.float64, torch.int32:
        wrong = zeros(backend, 2, 4, 5, 8, dtype=dtype)
        refuses(backend, ValueError, "^out must be ", dtype_name(torch.float32), dtype_name(dtype), out=wrong)
    refuses(
        backend, ValueError, "^out must be on q's device", "meta", out=torch.zeros(2, 4, 5, 8, device="meta")
    )
    for wrong in zeros(backend, 2, 4, 8, 5).mT, zeros(backend, 1, 4, 5, 8).expand(2, -1, -1, -1):
        strides = re.escape(str(list(wrong.stride())))
        refuses(
            backend, ValueError, "^out must have a contiguous last dim", "stride of 0", strides, out=wrong
        )
    out = zeros(backend, 2, 4, 5, 8)
    for other in {"return_state": True}, {"return_lse": True}, {"state": state_of(backend)}:
        refuses(backend, ValueError, "^out must be None with return_lse", out=out, **other)
    refuses(
        backend, ValueError, "^return_lse must be False with return_state", return_lse=True, return_state=True
    )


def test_out_that_overlaps_an_input(backend):
    """Refused in whatever way the memory is shared; parts of one storage that lie apart are fine."""
    storage = backend.randn(4, 2, 4, 7, 8)
    q, k, v = storage[0, :, :, :5], storage[1, :, :2], storage[2, :, :2]
    for name, out in (
        ("q", q),
        ("q", storage.view(-1)[1:][: 2 * 4 * 5 * 8].view(2, 4, 5, 8)),
        ("k", storage[1, :, :, 2:]),
        ("v", storage[2, :, :, :5]),
    ):
        refuses(backend, ValueError, f"^out must not overlap {name} in memory", q=q, k=k, v=v, out=out)
    sinks = storage[3].view(-1)[-4:]
    whole = storage[3].view(-1)[-2 * 4 * 5 * 8 :].view(2, 4, 5, 8)
    refuses(backend, ValueError, "^out must not overlap sinks", q=q, k=k, v=v, sinks=sinks, out=whole)
    out = storage[3, :, :, :5]
    assert torch.equal(backend.forward(q, k, v, out=out), backend.forward(q, k, v))


def test_long_values(backend):
    refuses(backend, ValueError, "^backend must be", backend="a" * 10000)
    refuses(backend, TypeError, "^softmax_scale must be a number", softmax_scale=10**400)


@pytest.mark.parametrize("length", range(36, 42))
def test_long_name_that_ends_within_a_letter(backend, length):
    """The name is cut after 40 bytes, but not within one of its letters, which have several each."""
    refuses(backend, ValueError, "^backend must be", "a" * 36, backend="a" * length + "é漢😀" * 3)
    refuses(backend, TypeError, "^backend must be", backend="a" * length + "\ud800")


@pytest.mark.parametrize("wrong", [1e39, -1e300])
def test_softmax_scale_that_only_a_double_holds(backend, wrong):
    refuses(backend, ValueError, "^softmax_scale ", "finite float32", softmax_scale=wrong)


def test_misspelt_keyword(backend):
    refuses(backend, TypeError, "unexpected keyword argument 'causa'", causa=True)


@pytest.mark.parametrize(
    "keyword, hint",
    {
        "is_causal": "causal=True",
        "scale": "softmax_scale",
        "mask": "use attn_mask",
        "dropout": "use dropout_p",
        "enable_gqa": "fewer heads",
        "cu_seqlens": "cu_seqlens_q",
        "cache_seqlens": "seqlens_k",
        "sm_scale": "softmax_scale",
        "return_attn_probs": "return_lse",
        "s_aux": "sinks",
        "query": "use q",
        "logits_soft_cap": "use softcap",
    }.items(),
)
def test_keyword_of_another_library(backend, keyword, hint):
    refuses(backend, TypeError, f"unexpected keyword argument '{keyword}'; ", hint, **{keyword: 1})


def test_missing_and_surplus_arguments(backend):
    q, k, v = backend.qkv()
    with pytest.raises(TypeError, match="'v'"):
        minimal_attn.forward(q, k)
    for function in minimal_attn.forward, minimal_attn.explain:
        with pytest.raises(
            TypeError, match="q, k, v as positional arguments, not bool, NoneType: .*causal=True"
        ):
            function(q, k, v, True, None)
    with pytest.raises(
        TypeError, match="do, q, k, v, o, l, m as positional arguments, not NoneType: .*causal=True"
    ):
        minimal_attn.backward(q, q, k, v, q, q[..., 0], None, None)


def test_backend(backend):
    for wrong in "gpu", "", "CPU", "sm70":
        refuses(backend, ValueError, r"^backend ", f'"{wrong}"|{wrong!r}', "auto", "cpu", backend=wrong)
    unfit = [name for name in minimal_attn._C.backends() if (name == "cpu") != (backend.name == "cpu")]
    for name in unfit:
        refuses(backend, ValueError, r"^backend ", name, backend.device.type, backend=name)


def state_of(backend, o=(2, 4, 5, 8), l=(2, 4, 5), m=(2, 4, 5), **dtypes):
    shapes = {"o": o, "l": l, "m": m}
    return tuple(
        zeros(backend, *shapes[name], dtype=dtypes.get(f"{name}_dtype", torch.float32)) for name in "olm"
    )


@pytest.mark.parametrize("name", ["o", "l", "m"])
def test_state(backend, name):
    right = (2, 4, 5, 8) if name == "o" else (2, 4, 5)
    for shape in (*right[:2], 6, *right[3:]), right[1:], (1, *right), (*right, 1), ():
        refuses(
            backend,
            ValueError,
            "state",
            rf"\b{name}\b",
            re.escape(str(list(shape))),
            state=state_of(backend, **{name: shape}),
        )
    for wrong in torch.float64, torch.float16, torch.bfloat16, torch.int32:
        state = state_of(backend, **{f"{name}_dtype": wrong})
        refuses(
            backend,
            ValueError,
            "state",
            rf"\b{name}\b",
            dtype_name(wrong),
            dtype_name(torch.float32),
            state=state,
        )
    state = [t.to("meta") if n == name else t for n, t in zip("olm", state_of(backend), strict=True)]
    refuses(backend, ValueError, "state", rf"\b{name}\b", "device", "meta", state=tuple(state))


def test_state_of_another_type(backend):
    o, l, m = state_of(backend)
    for wrong in (
        (o,),
        (o, l),
        (o, l, m, m),
        o,
        (o, l, None),
        (None, None, None),
        (o, l, 3.0),
        ("o", "l", "m"),
    ):
        refuses(backend, TypeError, r"^state ", r"\(o, l, m\)", state=wrong)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_forward_mode_gradients(backend, name):
    from torch.autograd import forward_ad

    tensors = dict(zip("qkv", backend.qkv(Nq=5, Nk=7, d=8), strict=True))
    with forward_ad.dual_level():
        tensors[name] = forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        for grad_mode in torch.enable_grad, torch.no_grad:  # no_grad doesn't switch forward mode off
            with grad_mode(), pytest.raises(RuntimeError, match=rf"^{name} must not be a dual tensor"):
                backend.forward(**tensors)


@pytest.mark.skipif(
    not torch.cuda.is_available() or bool(minimal_attn._C.cuda_architectures()),
    reason="needs a GPU and a build without CUDA code",
)
def test_gpu_and_a_build_without_cuda():
    q = torch.zeros(1, 1, 2, 8, device="cuda")
    with pytest.raises(ValueError, match="^q .*cuda.*no CUDA code.*make") as error:
        minimal_attn.forward(q, q, q)
    assert "\n" not in str(error.value)
    q = q.cpu()
    assert not minimal_attn.forward(q, q, q).any()


def test_nothing_is_printed(backend, capfd):
    backend.forward(*backend.qkv(), causal=True, return_state=True)
    if backend.device.type == "cuda":
        torch.cuda.synchronize()  # a kernel's printf shows only then
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["causal", "return_state", "return_lse"])
@pytest.mark.parametrize("wrong", [None, 1, 0.0, float("nan"), torch.zeros(2), numpy.True_], ids=repr)
def test_what_is_only_true_or_false(backend, name, wrong):
    """pybind11's bool takes None for False, and numbers."""
    refuses(backend, TypeError, rf"^{name} must be True or False", **{name: wrong})
    with pytest.raises(TypeError, match=rf"^{name} must be True or False") as error:
        minimal_attn.explain(*backend.qkv(), **{name: wrong})
    assert "(bool)" not in str(error.value)


@pytest.mark.parametrize("wrong", ["cpu\n", "a\r\nb", "auto\0"], ids=repr)
def test_backend_with_control_characters(backend, wrong):
    refuses(backend, ValueError, "^backend must be ", backend=wrong)


@pytest.mark.parametrize("name", ["q", "k", "v", "seqlens_k", "offset", "sinks", "out", "state"])
def test_memory_that_was_freed(backend, name):
    """FSDP frees parameters by resizing their storage: reading them would crash."""
    q, k, v = backend.qkv(B=2, Hq=4, Hkv=2, Nq=5, Nk=7, d=8)
    given = {"q": q, "k": k, "v": v, "out": torch.zeros_like(q), "sinks": zeros(backend, 4)}
    t = state_of(backend)[2] if name == "state" else given.get(name, backend.ints(3, 4)).clone()
    value = (*state_of(backend)[:2], t) if name == "state" else t
    t.untyped_storage().resize_(0)
    message = rf"^{name}\b.* must have memory, but needs \d+ bytes"
    refuses(backend, ValueError, message, **{name: value})
    with pytest.raises(ValueError, match=message):
        backend.explain(**{"q": q, "k": k, "v": v, name: value})
