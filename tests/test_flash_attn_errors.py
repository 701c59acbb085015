"""Bad input to minimal_attn.flash_attn: one line that names the argument."""

import inspect
import itertools
import math
import re

import numpy
import pytest
import torch
from conftest import Backend

from minimal_attn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def refuses(error, function, options, *patterns):
    """One line with all of the patterns."""
    with pytest.raises(error) as caught:
        function(**options)
    message = str(caught.value)
    assert "\n" not in message.strip() and len(message) < 300, message
    for pattern in patterns:
        assert re.search(pattern, message), f"no {pattern!r} in {message!r}"


def good(backend, function):
    """Arguments of a good call: B 2, Nq 5, Nk 7, Hq 4, Hkv 2, d 8."""
    q, k, v = (x.transpose(1, 2) for x in backend.qkv(Nq=5, Nk=7, d=8))
    if function is flash_attn_func:
        return dict(q=q, k=k, v=v)
    if function is flash_attn_with_kvcache:
        new = dict(k=k[:, :2].clone(), v=v[:, :2].clone())
        return dict(q=q, k_cache=k, v_cache=v, **new, cache_seqlens=backend.ints(5, 3))
    cu_seqlens = dict(cu_seqlens_q=backend.ints(0, 5, 10), cu_seqlens_k=backend.ints(0, 7, 14))
    return dict(
        q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1), **cu_seqlens, max_seqlen_q=5, max_seqlen_k=7
    )


NO_INTS = [None, "9", 12.5, 9.0, True, numpy.True_, numpy.float64(9), torch.tensor(9.0)]
NO_INTS += [torch.tensor(9, device="meta")]
FUNCTIONS = [flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "name, value",
    [
        ("dropout_p", 1.7),
        ("dropout_p", math.nan),
        ("dropout_p", "x"),
    ],
)
def test_dropout_p(backend, function, name, value):
    options = good(backend, function)
    if name in inspect.signature(function).parameters:
        refuses(
            ValueError, function, options | {name: value}, f"^{name} must be None or a number from 0 to 1"
        )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_alibi_slopes(backend, function):
    options = good(backend, function)
    slopes = torch.ones(options["q"].shape[-2], device=backend.device)
    function(**options, alibi_slopes=slopes)
    for error, wrong, match in (
        (ValueError, slopes[1:], r"have shape \("),
        (ValueError, slopes.double(), "be torch.float32"),
        (TypeError, 0.5, "be a tensor, but was 0.5"),
    ):
        refuses(error, function, options | {"alibi_slopes": wrong}, "^alibi_slopes must " + match)
    of_sequences = options | {"alibi_slopes": slopes.expand(2, -1)}
    function(**of_sequences)
    refuses(ValueError, function, options | {"alibi_slopes": slopes.expand(3, -1)}, "^alibi_slopes must have")
    if function is flash_attn_varlen_func:
        of_sequences |= {name: of_sequences[name][None] for name in "kv"}  # a page
        of_sequences |= dict(block_table=backend.ints([0], [0]))
        refuses(NotImplementedError, function, of_sequences, r"^alibi_slopes must be \(Hq,\) for packed")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_softcap(backend, function):
    options = good(backend, function)
    for wrong in math.nan, math.inf, 1e31:
        refuses(ValueError, function, options | {"softcap": wrong}, "^softcap must be None, 0 .*but was ")
    refuses(
        TypeError, function, options | {"softcap": "50"}, "^softcap must be a number or None, but was '50'"
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_of_another_kind(backend, function):
    options = good(backend, function)
    names = [name for name, x in options.items() if isinstance(x, torch.Tensor)]
    for name in names:
        x = options[name]
        integers = not x.is_floating_point()
        refuses(
            TypeError, function, options | {name: 3.5}, f"^{name} must be (an int or )?a tensor, but was 3.5"
        )
        wrong = options | {name: x[None]}
        refuses(ValueError, function, wrong, rf"^{name} must have shape \(.*\), but has shape \(1, ")
        other = x.short() if integers else x.double()
        refuses(ValueError, function, options | {name: other}, f"^{name} must be torch.*, but is torch")
        if name != "q":
            refuses(
                ValueError,
                function,
                options | {name: x.to("meta")},
                f"^{name} must be on q's device .* on meta",
            )
            if name.startswith("v"):  # its head dimension is its own
                wrong = options | {name: x[..., :0]}
                refuses(ValueError, function, wrong, rf"^{name} must have (a head dimension|shape \(.*, 8\))")
            elif not name.startswith("cu_seqlens_q"):
                refuses(ValueError, function, options | {name: x[..., :1]}, f"^{name} must have shape")
    sinks = backend.randn(3)
    refuses(
        ValueError,
        function,
        options | {"s_aux": sinks},
        r"^s_aux must have shape \(4,\), but has shape \(3,\)",
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*torch.jit.script")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_that_are_not_dense(backend, function):
    options = good(backend, function)
    for name, x in list(options.items()):
        if not isinstance(x, torch.Tensor):
            continue
        nested = torch.nested.nested_tensor([torch.ones(2, 3)] * 2, device=backend.device)
        for wrong, words in (x.to_sparse(), "one of layout torch.sparse_coo"), (nested, "a nested one"):
            message = f"^{name} must be a dense tensor, but was {words}"
            refuses(TypeError, function, options | {name: wrong}, message)
        if backend.device.type == "cpu" and x.is_floating_point():
            wrong = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
            message = f"^{name} must be torch.* but is torch.qint8: x.dequantize"
            refuses(ValueError, function, options | {name: wrong}, message)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values(backend, function):
    options = good(backend, function)
    refuses(ValueError, function, options | {"softmax_scale": math.nan}, "^softmax_scale must be .* nan")
    refuses(TypeError, function, options | {"causal": "yes"}, "^causal must be True or False, but was .yes.")
    for window_size in (1, 2, 3), None, 5, "ab", (1.5, 2), (None, None), torch.tensor([0.5, 1.0]):
        wrong = options | {"window_size": window_size}
        refuses(TypeError, function, wrong, f"^window_size must be two .*{re.escape(str(window_size))}")


def test_no_query_is_checked_as_well(backend):
    options = good(backend, flash_attn_varlen_func)
    options |= dict(q=options["q"][:0], cu_seqlens_q=backend.ints(0, 0, 0), max_seqlen_q=0)
    out, lse, _ = flash_attn_varlen_func(**options, return_attn_probs=True)
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    for error, wrong, pattern in (
        (ValueError, dict(softmax_scale=math.nan), "^softmax_scale must be .* nan"),
        (TypeError, dict(causal="yes"), "^causal must be True or False"),
        (ValueError, dict(q=backend.randn(0, 3, 8)), "^q must have a multiple of k's heads"),
    ):
        refuses(error, flash_attn_varlen_func, options | wrong, pattern)


def test_lengths_of_another_type(backend):
    options = good(backend, flash_attn_varlen_func)
    for name, wrong in itertools.product(("max_seqlen_q", "max_seqlen_k"), NO_INTS):
        message = f"^{name} must be an int, but was {re.escape(repr(wrong))}"
        refuses(TypeError, flash_attn_varlen_func, options | {name: wrong}, message)
    options = good(backend, flash_attn_with_kvcache)
    for wrong in set(NO_INTS) - {None}:
        if not isinstance(wrong, torch.Tensor):
            message = f"^cache_seqlens must be an int or a tensor, but was {re.escape(repr(wrong))}"
            refuses(TypeError, flash_attn_with_kvcache, options | dict(cache_seqlens=wrong), message)


@pytest.mark.parametrize("number", [numpy.int64, torch.tensor])
def test_lengths_that_stand_for_an_int(backend, number):
    options = good(backend, flash_attn_varlen_func) | dict(causal=True)
    same = dict(max_seqlen_q=number(5), max_seqlen_k=number(7), window_size=(number(-1), number(0)))
    assert torch.equal(flash_attn_varlen_func(**options | same), flash_attn_varlen_func(**options))
    if number is not torch.tensor:
        options = good(backend, flash_attn_with_kvcache)
        calls = [flash_attn_with_kvcache(**options | dict(cache_seqlens=n(4))) for n in (int, number)]
        assert torch.equal(*calls)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_heads_and_tokens_in_each_other_s_place(backend, function):
    """And shapes in errors are those of the caller."""
    options = good(backend, function)
    names = [name for name in options if name in ("q", "k", "v", "k_cache", "v_cache")]
    swapped = options | {name: options[name].transpose(-3, -2) for name in names}
    if function is flash_attn_varlen_func:
        del swapped["cu_seqlens_q"], swapped["cu_seqlens_k"]
        swapped |= dict(cu_seqlens_q=backend.ints(0, 4), cu_seqlens_k=backend.ints(0, 2))
    keys = "k_cache" if "k_cache" in options else "k"
    todo = rf"^q must have a multiple of {keys}'s heads, .*SDPA.*transpose\(-3, -2\)"
    refuses(ValueError, function, swapped, todo)
    wide = {name: options[name].repeat_interleave(80, -1) for name in names}
    most = 576
    shape = re.escape(str(tuple(wide["q"].shape)))
    refuses(ValueError, function, options | wide, rf"^q must have .* d from 1 to {most}, but .* {shape}")


@pytest.mark.parametrize("size", [(0, 3), (3, 0)])
def test_pages_without_a_key(backend, size):
    pages = backend.randn(*size, 2, 8)
    table = dict(block_table=torch.zeros(2, 2, dtype=torch.int32, device=backend.device))
    options = good(backend, flash_attn_varlen_func) | dict(k=pages, v=pages, max_seqlen_k=0)
    options |= dict(cu_seqlens_k=backend.ints(0, 0, 0), **table)
    refuses(ValueError, flash_attn_varlen_func, options, "^k must have pages, .*" + re.escape(str(size)[:-1]))
    options = dict(q=backend.randn(2, 5, 4, 8), k_cache=pages, v_cache=pages, **table)
    for lengths in dict(cache_seqlens=backend.ints(0, 0)), dict(cache_seqlens=0), {}:
        refuses(ValueError, flash_attn_with_kvcache, options | lengths, "^k_cache must have pages, ")


def test_pages_that_do_not_exist():
    """On a GPU PyTorch's assertion finds them."""
    backend = Backend("cpu", 0)
    k, v = (backend.randn(3, 4, 2, 8) for _ in "kv")
    table = backend.ints(0, 3, 1, -1).view(2, 2)
    options = good(backend, flash_attn_varlen_func) | dict(k=k, v=v, block_table=table)
    refuses(ValueError, flash_attn_varlen_func, options, "^block_table must be 0 to 2, but is -1")
    options = dict(q=backend.randn(2, 5, 4, 8), k_cache=k, v_cache=v, block_table=table)
    refuses(ValueError, flash_attn_with_kvcache, options, "^block_table must be 0 to 2, but is -1")
    wrong = options | dict(cache_seqlens=backend.ints(5, 4))
    refuses(ValueError, flash_attn_with_kvcache, wrong, "^block_table must be 0 to 2, but is 3")
    flash_attn_with_kvcache(**options | dict(cache_seqlens=backend.ints(4, 4)))


def each_with_grad(options):
    for name, x in options.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            yield options | {name: x.clone().requires_grad_()}


def test_gradients_of_caches_are_refused(backend):
    for options in each_with_grad(good(backend, flash_attn_with_kvcache)):
        pattern = "must not require grad, but does", r"torch.no_grad\(\)"
        refuses(RuntimeError, flash_attn_with_kvcache, options, *pattern)
        with torch.no_grad():
            flash_attn_with_kvcache(**options)


def test_lengths_that_do_not_fit():
    """On a GPU the host doesn't know them."""
    backend = Backend("cpu", 0)
    options = good(backend, flash_attn_varlen_func)
    for wrong, *patterns in (
        (dict(max_seqlen_q=4), "^max_seqlen_q must be at least 5.* 4"),
        (dict(max_seqlen_k=6), "^max_seqlen_k must be at least 7.* 6"),
        (
            dict(cu_seqlens_q=backend.ints(0, 5, 11), max_seqlen_q=9),
            "^cu_seqlens_q must end at most at 10.* 11",
        ),
        (
            dict(cu_seqlens_k=backend.ints(0, 7, 15), max_seqlen_k=9),
            "^cu_seqlens_k must end at most at 14.* 15",
        ),
        (dict(cu_seqlens_q=backend.ints(0)), r"^cu_seqlens_q must have shape \(B \+ 1,\)"),
        (dict(cu_seqlens_k=backend.ints(-3, 3, 14), max_seqlen_k=99), "^cu_seqlens_k must begin at 0 .*-3"),
        (
            dict(cu_seqlens_q=backend.ints(0, 6, 5), max_seqlen_q=9),
            "^cu_seqlens_q must .*never decrease.* 6, 5",
        ),
        (dict(seqused_k=torch.tensor([7, -(2**63)])), "^seqused_k must be 0 to"),
        (dict(seqused_k=backend.ints(7)), r"^seqused_k must have shape \(2,\)"),
        (dict(seqused_k=backend.ints(7, -1)), "^seqused_k must be 0 to .* -1"),
        (dict(seqused_k=backend.ints(0, 8), max_seqlen_k=9), "^seqused_k must fit in cu_seqlens_k.* 1 keys"),
        (dict(seqused_k=backend.ints(2, 5), max_seqlen_k=4), "^max_seqlen_k must be at least 5.* 4"),
    ):
        refuses(ValueError, flash_attn_varlen_func, options | wrong, *patterns)
    options |= dict(k=backend.randn(9, 3, 2, 8), v=backend.randn(9, 3, 2, 8))
    narrow = options | dict(block_table=torch.zeros(2, 2, dtype=torch.int32))
    refuses(ValueError, flash_attn_varlen_func, narrow, "^block_table must have pages for 7 keys.* 6")


def test_more_keys_than_a_call_may_have(backend):
    """The error has what the caller passed, not the sizes of blocks."""
    options = good(backend, flash_attn_varlen_func)
    pages = backend.randn(9, 16, 2, 8)
    options |= dict(k=pages, v=pages, block_table=backend.ints(3, 4).view(2, 1).expand(2, 2**24))
    flash_attn_varlen_func(**options)
    wrong = options | dict(max_seqlen_k=2**28)
    refuses(
        ValueError, flash_attn_varlen_func, wrong, "^max_seqlen_k must be less than 268435456 .*268435456$"
    )


def test_caches_that_overlap_themselves(backend):
    """A row for all sequences is read, but not written."""
    options = good(backend, flash_attn_with_kvcache)
    for name in "k_cache", "v_cache":
        expanded = options | {name: options[name][:1].expand(2, -1, -1, -1)}
        refuses(ValueError, flash_attn_with_kvcache, expanded, rf"^{name} must not overlap itself, .*\(0, ")
        windows = options[name].flatten()[: 2 * 7 * 4 * 8].as_strided((2, 7, 2, 8), (56, 8, 8, 1))
        refuses(ValueError, flash_attn_with_kvcache, options | {name: windows}, f"^{name} must not overlap")
        flash_attn_with_kvcache(**expanded | dict(k=None, v=None))


def test_a_cache_is_as_before_after_an_error():
    backend = Backend("cpu", 0)
    options = good(backend, flash_attn_with_kvcache)
    before = options["k_cache"].clone(), options["v_cache"].clone()
    table = torch.zeros(2, 1, dtype=torch.int32)
    for error, wrong, *patterns in (
        (ValueError, dict(cache_seqlens=6), "^cache_seqlens must be 0 to 5, but is 6"),
        (ValueError, dict(cache_seqlens=-1), "^cache_seqlens must be 0 to 5, but is -1"),
        (ValueError, dict(cache_seqlens=backend.ints(3, 6)), "^cache_seqlens must be 0 to 5, but is 6"),
        (ValueError, dict(cache_seqlens=None), "^cache_seqlens must be given"),
        (
            ValueError,
            dict(cache_seqlens=7, k=None, v=None, block_table=table[:, :0]),
            "^cache_seqlens must be",
        ),
        (TypeError, dict(v=None), "^v must be a tensor, but was None"),
        (TypeError, dict(k=None), "^k must be a tensor, but was None"),
        (
            ValueError,
            dict(cache_batch_idx=backend.ints(0, 1), block_table=table),
            "^cache_batch_idx must be None",
        ),
        (ValueError, dict(cache_leftpad=backend.ints(0)), r"^cache_leftpad must have shape \(2,\)"),
        (
            ValueError,
            dict(k_cache=before[0][:1], v_cache=before[1][:1]),
            "^k_cache must have at least q's 2 .* 1",
        ),
        (ValueError, dict(q=backend.randn(2, 5, 3, 8)), "^q must have a multiple of k_cache's heads"),
        (ValueError, dict(softmax_scale=math.inf), "^softmax_scale"),
    ):
        refuses(error, flash_attn_with_kvcache, options | wrong, *patterns)
        assert torch.equal(options["k_cache"], before[0]) and torch.equal(options["v_cache"], before[1])


def test_wrong_rotary_tables(backend):
    right = torch.ones(7, 4, device=backend.device)
    options = good(backend, flash_attn_with_kvcache) | dict(rotary_cos=right, rotary_sin=right)
    flash_attn_with_kvcache(**options)
    must = r"^rotary_cos must have shape \(at least 7, at most 4\), but has shape "
    for error, wrong, pattern in (
        (ValueError, dict(rotary_cos=right[:6], rotary_sin=right[:6]), must + r"\(6, 4\)"),
        (
            ValueError,
            dict.fromkeys(("rotary_cos", "rotary_sin"), right[:, :1].expand(7, 5)),
            must + r"\(7, 5",
        ),
        (TypeError, dict(rotary_sin=None), "^rotary_sin must be a tensor, but was None"),
        (TypeError, dict(rotary_cos=None), "^rotary_cos must be a tensor, but was None"),
        (ValueError, dict(rotary_sin=right[:, :3]), r"^rotary_sin must have shape \(7, 4\)"),
        (ValueError, dict(rotary_cos=right.double()), "^rotary_cos must be torch.float32 or "),
        (ValueError, dict(rotary_cos=right.to("meta")), "^rotary_cos must be on q's device"),
        (ValueError, dict(k=None, v=None), "^rotary_cos must be None without k and v, but was a tensor"),
    ):
        refuses(error, flash_attn_with_kvcache, options | wrong, pattern)
