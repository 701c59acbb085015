"""Random calls of minimal_attn.forward: float64's values, or a one-line error that names an argument.

    PYTHONPATH=. build/python tests/fuzz.py --calls 1000      on the CPU, with a fresh seed
    ... --device cuda --seconds 30
    ... --seed 123 --first 456 --calls 1                      one call of an earlier run

A call begins as a valid one. Then up to two of its arguments may be replaced: by something that must be
refused, or by something that may be taken or refused (a NumPy integer, say). test_fuzz.py runs a few seconds
of calls in the suite.
"""

import argparse
import contextlib
import faulthandler
import itertools
import os
import random
import re
import sys
import time
import traceback
import zlib
from dataclasses import dataclass, field

import torch
from fuzz_wrong import KEYWORDS, has_memory, replace
from reference import attention

import minimal_attn

INTEGERS = [torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32]
# Of o's rows, relative: a wrong element shows, a rounding doesn't.
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class Plain(torch.Tensor):
    """A subclass without behaviour of its own."""


@dataclass
class Call:
    """A call of forward; `wrong` and `perhaps` name the arguments that were replaced."""

    random: random.Random
    generator: torch.Generator
    device: torch.device
    arguments: dict = field(default_factory=dict)
    wrong: set = field(default_factory=set)
    perhaps: set = field(default_factory=set)
    context: object = contextlib.nullcontext
    autocast: torch.dtype | None = None
    is_final: bool = False  # no further argument may be replaced

    def chance(self, probability):
        return self.random.random() < probability

    def choice(self, *choices):
        return self.random.choice(choices)

    def randn(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def zeros(self, *shape, **options):
        return torch.zeros(shape, **{"device": self.device, **options})


# ------------------------------------------------------------------------------------ a valid call


def draw(seed, device):
    call = Call(
        random.Random(seed), torch.Generator().manual_seed(zlib.crc32(seed.encode())), torch.device(device)
    )
    if call.chance(0.05):
        call.autocast = call.choice(torch.float16, torch.bfloat16)
    draw_tensors(call)
    draw_mask(call)
    draw_state(call)
    names = [backend for backend in minimal_attn._C.backends() if serves(backend, call)]
    call.arguments["backend"] = call.choice("auto", *names)
    if call.chance(0.1):
        call.context = call.choice(torch.no_grad, torch.inference_mode)
    return call


def serves(backend, call):
    if call.device.type == "cpu" or backend == "cpu":
        return backend == call.device.type
    return backend != "hopper" or torch.cuda.get_device_capability() == (9, 0)


def draw_tensors(call):
    dtype = call.choice(torch.float32, torch.float16, torch.bfloat16)
    B, Hkv, group = call.choice(0, 1, 1, 2, 3), call.choice(0, 1, 1, 2, 3), call.choice(1, 1, 2, 3, 8)
    Nq, Nk = (call.choice(0, 1, 1, 2, 3, 5, 9, 17, call.random.randint(0, 80)) for _ in range(2))
    d = call.choice(1, 2, 3, 7, 8, 16, 32, 33, 64, 65, 127, 128, 255, 256, call.random.randint(1, 256))
    keys = (B, Hkv, Nk, d)
    if call.chance(0.15):
        pages, page_size, n = call.random.randint(1, 9), call.choice(1, 3, 16, 32), call.random.randint(0, 4)
        table = torch.tensor([call.random.randint(-2, pages + 1) for _ in range(B * n)], dtype=torch.int64)
        call.arguments["block_table"] = table.view(B, n).to(call.device, call.choice(torch.int32, *INTEGERS))
        keys = (pages, Hkv, page_size, d)
    d_v = d if call.chance(0.7) else call.choice(1, 8, 33, 64, 128, 192, call.random.randint(1, 256))
    shapes = {"q": (B, group * Hkv, Nq, d), "k": keys, "v": (*keys[:3], d_v)}
    for name, shape in shapes.items():
        call.arguments[name] = tensor(call, shape, dtype)


def tensor(call, shape, dtype):
    """Of random values and random strides."""
    layout = call.random.randrange(12)
    if layout <= 2:
        t = call.randn(*shape, dtype=dtype)
    elif layout == 3:
        order = call.random.sample(range(len(shape)), len(shape))
        t = call.randn(*(shape[i] for i in order), dtype=dtype).permute(
            [order.index(i) for i in range(len(shape))]
        )
    elif layout in (4, 5) and len(shape) == 4:
        t = call.randn(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
    elif layout in (6, 7):  # a slice of something larger, with steps
        steps = [call.choice(1, 1, 1, 2) for _ in shape]
        starts = [call.choice(0, 0, 1, 3) for _ in shape]
        larger = call.randn(*(a + n * s for a, n, s in zip(starts, shape, steps, strict=True)), dtype=dtype)
        t = larger[tuple(slice(a, a + n * s, s) for a, n, s in zip(starts, shape, steps, strict=True))]
    elif layout in (8, 9):  # stride 0
        repeated = [call.chance(0.4) and n > 0 for n in shape]
        t = call.randn(*(1 if r else n for r, n in zip(repeated, shape, strict=True)), dtype=dtype).expand(
            shape
        )
    elif layout == 10:  # rows that overlap; a dimension of one element may have any stride
        strides = [call.choice(1, 2, 5, 8) if n > 1 else call.choice(1, 0, 2**40, 2**62) for n in shape]
        strides[-1] = call.choice(1, strides[-1]) if shape[-1] > 1 else strides[-1]
        size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 0)
        t = call.randn(size + 1, dtype=dtype)[call.choice(0, 1) :].as_strided(shape, strides)
    else:
        t = torch._neg_view(call.randn(*shape, dtype=dtype))
    if call.chance(0.05):
        t = call.choice(lambda t: t.as_subclass(Plain), lambda t: torch.nn.Parameter(t, requires_grad=False))(
            t
        )
    return t


def ints(call, *usual):
    """One integer a batch, of any dtype and stride: usual ones and the largest that there are."""
    B = call.arguments["q"].shape[0]
    dtype = call.choice(torch.int32, *INTEGERS)
    info = torch.iinfo(dtype)
    within = [value for value in (*usual, -1, 2**31 - 1, -(2**31), 2**31) if info.min <= value <= info.max]
    values = [call.choice(*within, info.min, info.max) if call.chance(0.3) else within[0] for _ in range(B)]
    t = torch.tensor(values, dtype=torch.int64).to(dtype).to(call.device)
    if call.chance(0.2):
        t = torch.stack([t, t], dim=-1)[:, 1]
    return t[:1].expand(B) if call.chance(0.1) and B > 0 else t


def ranges(call, B, Nq, Nk):
    """A range of keys for each query: documents that grow, or anything; now and then far outside."""
    if call.chance(0.6):
        step = call.choice(1, 5, 16, 40)
        begin = torch.arange(Nq) // step * step
        end = begin + step if call.chance(0.5) else torch.arange(Nq) + 1
        t = torch.stack([begin, end], -1).repeat(B, 1, 1)
    else:
        t = torch.tensor([call.random.randint(-3, Nk + 3) for _ in range(2 * B * Nq)]).view(B, Nq, 2)
    t = t.long().to(call.device, call.choice(torch.int32, torch.int64))
    if call.chance(0.1) and t.numel():
        t[0, -1] = call.choice(torch.iinfo(t.dtype).min, torch.iinfo(t.dtype).max)
    return t if call.chance(0.7) else t.mT.contiguous().mT


def draw_mask(call):
    a, Nq, Nk = call.arguments, call.arguments["q"].shape[2], call.arguments["k"].shape[2]
    if "block_table" in a:
        Nk *= a["block_table"].shape[1]
    if call.chance(0.3):
        a["causal"] = call.choice(True, False)
    if call.chance(0.3):
        a["window_size"] = tuple(call.choice(-1, 0, 1, 5, 40, 2**31, 2**62, 2**63 - 1) for _ in range(2))
    if call.chance(0.3):
        scales = 1.0, 0.1, 1.5, 0.0, -0.5, 1e-30, -1e-300
        a["softmax_scale"] = call.choice(None, 0, *(x / a["q"].shape[3] ** 0.5 for x in scales))
    if call.chance(0.15):
        a["softcap"] = call.choice(None, 0, 0.5, 2, 50.0, 1e30)
    if call.chance(0.3):
        a["seqlens_k"] = ints(call, call.random.randint(0, Nk), Nk, 0)
    if call.chance(0.2):
        a["leftpad_k"] = ints(call, call.random.randint(0, Nk), 0, Nk)
    if call.chance(0.4):
        far = 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63)
        a["offset"] = (
            ints(call, call.random.randint(-10, 60), 0, Nk)
            if call.chance(0.4)
            else call.choice(None, 0, 3, Nk - Nq, call.random.randint(-90, 90), *far)
        )
    # float64 tells scores apart that float32 doesn't, far from all keys.
    offset = 0 if a.get("offset") is None else a["offset"]
    is_near = bool((torch.as_tensor(offset).double().abs() < 200).all())
    if call.chance(0.15) and is_near:
        shape = call.choice((a["q"].shape[1],), a["q"].shape[:2])
        a["alibi_slopes"] = tensor(call, shape, torch.float32) / call.choice(8, 100)
    pairs = [*a["q"].shape[:3], Nk]
    shape = [n if call.chance(0.7) else 1 for n in pairs][call.choice(0, 0, 1, 2, 3) :]
    if call.chance(0.15):
        a["attn_mask"] = tensor(call, shape, torch.float32) < call.choice(-1, 0, 2)
    if call.chance(0.15):
        dtype = call.choice(torch.float32, call.autocast or a["q"].dtype)
        term = tensor(call, shape, dtype)
        a["bias"] = term.masked_fill(term > 1, -torch.inf) if call.chance(0.3) else term
        if "attn_mask" not in a and call.chance(0.5):
            a["attn_mask"] = a.pop("bias")
    if call.chance(0.15):
        a["dropout_p"] = call.choice(0.0, 0.1, 0.5, 0.999, 1, 1e-9)
        a["dropout_seed"] = torch.tensor([call.random.randint(-(2**63), 2**63 - 1)]).to(call.device)
    if call.chance(0.2):
        a["key_ranges"] = ranges(call, call.choice(1, a["q"].shape[0]), Nq, Nk)
    if call.chance(0.3) and a["q"].shape[0] == 1 and not {"seqlens_k", "leftpad_k", "offset"} & a.keys():
        n = call.choice(1, 2, 5)
        for name, total in ("cu_seqlens_q", Nq), ("cu_seqlens_k", Nk):
            cu = sorted(call.random.randint(0, total) for _ in range(n))
            a[name] = torch.tensor(cu).to(call.device, call.choice(torch.int32, torch.int64))
        if call.chance(0.3):
            values = [call.choice(0, 1, call.random.randint(0, Nk), 2**31 - 1) for _ in range(n - 1)]
            a["seqused_k"] = torch.tensor(values, dtype=torch.int64).to(call.device)
    if call.chance(0.3):
        n = len(a["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in a else a["q"].shape[0]
        values = [call.choice(0, 1, 4, call.random.randint(0, Nk), 2**31 - 1) for _ in range(n)]
        dtype = call.choice(torch.int32, *INTEGERS)
        a["prefix_k"] = torch.tensor(values).clamp(max=torch.iinfo(dtype).max).to(call.device, dtype)


def draw_state(call):
    a = call.arguments
    B, Hq, Nq, d = (*a["q"].shape[:3], a["v"].shape[3])  # o's
    returns = call.choice("o", "o", "lse", "state", "out")
    if returns == "lse":
        a["return_lse"] = True
    if returns == "state":
        a["return_state"] = True
    if returns == "out":
        larger = call.zeros(B, Hq, Nq, d + 3, dtype=call.autocast or a["q"].dtype)
        token_first = call.zeros(B, Nq, Hq, d, dtype=larger.dtype)
        a["out"] = call.choice(
            larger[..., 1 : d + 1], token_first.transpose(1, 2), larger[..., :d].contiguous()
        )
    if call.chance(0.2):
        a["sinks"] = tensor(
            call,
            call.choice((Hq,), (B, Hq)),
            call.choice(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        )
    elif returns != "out" and call.chance(0.2):
        o, l, m = (tensor(call, shape, torch.float32) for shape in ((B, Hq, Nq, d), (B, Hq, Nq), (B, Hq, Nq)))
        l = l.exp() if call.chance(0.7) else 0 * l
        if not l.any():
            o, m = 0 * o, torch.full_like(m, -torch.inf)
        a["state"] = o, l, m
    elif call.chance(0.1):
        a["state"] = None


# ------------------------------------------------------------------------------------ what must come of it


def plain(t):
    return t.detach().as_subclass(torch.Tensor).resolve_neg().cpu()


def expected(call):
    """The values (o, lse, l, m) in float64, and the yardstick of o's error."""
    a = call.arguments
    q, k, v = (plain(a[name]) for name in "qkv")
    dtype = q.dtype
    if call.autocast is not None:
        dtype = call.autocast
        q, k, v = (t.to(dtype) for t in (q, k, v))
    if a.get("block_table") is not None:
        table = plain(a["block_table"]).long().clamp(0, len(k) - 1)
        k, v = (t[table].transpose(1, 2).flatten(2, 3) for t in (k, v))
    options = {
        name: plain(a[name]) if isinstance(a[name], torch.Tensor) else a[name]
        for name in (
            *("causal", "window_size", "softmax_scale", "seqlens_k", "leftpad_k", "offset", "sinks"),
            *("key_ranges", "cu_seqlens_q", "cu_seqlens_k", "prefix_k", "seqused_k", "softcap"),
            *("alibi_slopes", "attn_mask", "bias", "dropout_p", "dropout_seed"),
        )
        if a.get(name) is not None
    }
    if "window_size" in options:
        options["window_size"] = tuple(map(int, options["window_size"]))
    for name in ("seqlens_k", "leftpad_k", "offset"):
        if isinstance(options.get(name), torch.Tensor):
            is_int32 = options[name].dtype == torch.int32
            options[name] = options[name].to(torch.int64)
            if not is_int32:  # as documented, which tells only with a window that is as large
                options[name] = options[name].clamp(1 - 2**31, 2**31 - 1)
    if "offset" in options and getattr(options["offset"], "dim", int)() == 0:
        options["offset"] = int(options["offset"])
    for name in {"softmax_scale", "softcap"} & options.keys():
        options[name] = float(options[name])
    o, l, m, size = attention(q, k, v, **options)
    if a.get("state") is not None:
        before = [plain(t).double() for t in a["state"]]
        top = torch.maximum(m, before[2])
        finite = top.masked_fill(top == -torch.inf, 0)
        old, new = before[1] * torch.exp(before[2] - finite), l * torch.exp(m - finite)
        l, m = old + new, top
        share = (torch.stack([old, new]) / l.masked_fill(l == 0, 1))[..., None]
        o = share[0] * before[0] + share[1] * o
        size = share[0] * before[0].abs() + share[1] * size
    return dtype, o, l, m, size


def check_values(call, results):
    a = call.arguments
    if max(a["q"].shape) > 300 or ("q" in call.perhaps and not a["q"].numel()):  # nothing to compare
        return
    if a.get("softcap") and abs(float(a.get("softmax_scale") or 0)) > 1e6:
        return  # tanh is 1 for many scores, which float64 tells apart
    dtype, o, l, m, size = expected(call)
    wants_state = a.get("return_state") or (a.get("state") is not None and not a.get("return_lse"))
    if a.get("out") is not None:
        assert results.data_ptr() == a["out"].data_ptr(), "out isn't returned"
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == (3 if wants_state else 2 if a.get("return_lse") else 1)
    assert results[0].dtype == (torch.float32 if wants_state else dtype)
    found = [plain(t).double() for t in results]
    assert found[0].shape == o.shape
    # A large sink makes o small. Subnormal float16 numbers have a spacing of 2^-24.
    smallest = 2**-24 * o.shape[-1] ** 0.5 if dtype == torch.float16 else 1e-7
    error, bound = (found[0] - o).norm(dim=-1), BOUND[dtype] * size.norm(dim=-1) + smallest
    assert (error <= bound).all(), f"o is wrong by {(error / bound).max():.3g} times the bound"
    lse = m + l.log()
    is_approximated = a.get("softcap") and dtype == torch.bfloat16 and a["q"].is_cuda  # tanh (scores.h)
    bound = 5e-3 if is_approximated else 1e-4
    if wants_state:
        torch.testing.assert_close(found[2], m, rtol=bound, atol=bound)
        found.append(found[2] + found[1].log())
    if len(found) > 1:
        torch.testing.assert_close(found[-1], lse, rtol=bound, atol=bound)


def check_error(call, error):
    message = str(error).strip()
    assert isinstance(error, (TypeError, ValueError, RuntimeError)), "an error of another type"
    # PyTorch's own error where a GPU's memory ends has several lines.
    is_short = "\n" not in message and len(message) < 500
    assert is_short or isinstance(error, torch.OutOfMemoryError), "an error of several lines"
    if "allocate" in message or "overflow" in message:  # tensors that no machine has
        assert any(isinstance(t, torch.Tensor) and t.numel() >= 2**28 for t in call.arguments.values())
        return
    names = call.wrong | call.perhaps
    assert names, "a valid call is refused"
    if names & {"q", "k", "v"}:  # of another shape or device: then others don't fit them
        names |= set(KEYWORDS) | {"q", "k", "v"}
    assert any(re.search(rf"\b{name}\b", message) for name in names), (
        f"the error names none of {sorted(names)}"
    )


def run(seed, device):
    """One call; raises AssertionError where it isn't as it must be."""
    call = draw(seed, device)
    if call.chance(0.5):
        for _ in range(call.choice(1, 1, 2)):
            if not call.is_final:
                replace(call)
    context = torch.autocast(call.device.type, call.autocast) if call.autocast else contextlib.nullcontext()
    tensors = [
        t for t in call.arguments.values() if type(t) is torch.Tensor and t is not call.arguments.get("out")
    ]
    dense = [t for t in tensors if t.layout == torch.strided and t.numel() < 2**20 and has_memory(t)]
    before = [plain(t).clone() for t in dense]
    with call.context(), context:
        if call.chance(0.1):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                str(minimal_attn.explain(**call.arguments))
        try:
            results = minimal_attn.forward(**call.arguments)
        except Exception as error:
            try:
                return check_error(call, error)
            except AssertionError as why:
                raise AssertionError(f"{why}: {type(error).__name__}: {error}\n{describe(call)}") from None
    try:
        assert not call.wrong, f"{sorted(call.wrong)} should have been refused"
        check_values(call, results)
        assert all(torch.equal(plain(t), b) or b.isnan().any() for t, b in zip(dense, before, strict=True)), (
            "an input has changed"
        )
    except Exception as error:
        raise AssertionError(f"{error}\n{describe(call)}") from None


def describe(call):
    def text(x):
        if isinstance(x, torch.Tensor):
            if x.layout != torch.strided or x.is_nested:
                return f"{type(x).__name__}, {x.layout}"
            values = f" {x.tolist()}" if x.dim() < 2 and x.numel() < 9 and has_memory(x) else ""
            layout = f"{tuple(x.shape)} {x.stride()} {x.dtype} {x.device} + {x.storage_offset()}"
            return f"{type(x).__name__} {layout}{values}"
        return "(" + ", ".join(map(text, x)) + ")" if isinstance(x, tuple) else repr(x)[:100]

    lines = [f"  {name} = {text(x)}" for name, x in call.arguments.items()]
    context = call.context.__name__, call.autocast
    return "\n".join(
        [f"  wrong: {sorted(call.wrong)}, perhaps: {sorted(call.perhaps)}, in {context}", *lines]
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--most", type=int, default=1, help="stop after so many failures")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log", help="a file that holds the number of the present call, for after a crash")
    options = parser.parse_args()
    log = options.log and os.open(options.log, os.O_WRONLY | os.O_CREAT)
    torch.set_num_threads(options.threads)
    faulthandler.enable()
    end = time.monotonic() + options.seconds
    failures, i = 0, options.first
    for i in itertools.count(options.first):
        if time.monotonic() > end or (options.calls is not None and i == options.first + options.calls):
            break
        if options.log:
            os.pwrite(log, b"%-20d" % i, 0)
        try:
            run(f"{options.seed}:{i}", options.device)
        except Exception:
            failures += 1
            print(f"--device {options.device} --seed {options.seed} --first {i} --calls 1")
            traceback.print_exc(file=sys.stdout)
            if failures == options.most:
                break
    print(f"{i - options.first} calls with --seed {options.seed}, {failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
