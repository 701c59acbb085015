"""The arguments of a ring's call: what a rank checks, what it tells the others, what they agree on."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import minimal_attn
from minimal_attn._peers import named
from minimal_attn._ring_masks import Mask, Part
from minimal_attn._zigzag import length, segments

ERRORS = {"TypeError": TypeError, "ValueError": ValueError}  # that go from rank to rank


@dataclass(frozen=True)
class Arguments:
    """Those of ring.forward that decide what is computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    group: dist.ProcessGroup
    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float | None
    offset: int | None
    timeout: float
    backend: str
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None

    @property
    def documents(self) -> tuple[Tensor, Tensor] | None:
        is_packed = self.cu_seqlens_q is not None or self.cu_seqlens_k is not None
        return (self.cu_seqlens_q, self.cu_seqlens_k) if is_packed else None

    def key(self) -> tuple | None:
        """All that `described` looks at, if it can be compared: then a call is like another one."""
        tensors = self.q, self.k, self.v, *(self.documents or ())
        if any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors):
            return None
        if any(x.is_nested or x.layout != torch.strided for x in tensors) or _is_transformed():
            return None
        if not isinstance(self.window_size, (tuple, list)):
            return None
        plain = *self.window_size, self.softmax_scale, self.softcap, self.offset
        plain += self.causal, self.timeout, self.backend
        if any(type(x) not in (int, float, bool, str, type(None)) for x in plain):
            return None
        seen = ((x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad) for x in tensors)
        packed = tensors[3:]
        if any(x.dim() != 1 or x.dtype not in _INTEGERS or x.device != self.q.device for x in packed):
            return None
        numbers = (tuple(x.tolist()) for x in packed if x.device.type == "cpu")
        kinds = tuple(type(x) for x in plain)  # 1 is not True
        is_one = self.cu_seqlens_q is self.cu_seqlens_k
        return torch.is_grad_enabled(), is_one, kinds, *plain, *seen, *numbers

    def described(self) -> dict:
        """What the other ranks must know of this one's arguments. Raises what is wrong with them."""
        q, k = self.q, self.k
        if not is_timeout(self.timeout):
            was = _line(self.timeout)
            raise ValueError(f"timeout must be a positive number of seconds below 1e6, but was {was}")
        if isinstance(self.offset, Tensor):
            raise TypeError("offset must be an int or None, but was a tensor")
        mask = dict(causal=self.causal, window_size=self.window_size, offset=self.offset)
        scores = dict(softmax_scale=self.softmax_scale, softcap=self.softcap)
        minimal_attn.explain(q, k, self.v, **mask, **scores, backend=self.backend)  # raises forward's errors
        if any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, self.v)):
            raise RuntimeError(
                "q, k and v must not be dual tensors, but are: there is no forward-mode derivative"
            )
        if self.documents:
            self._check_documents()
        backends = dist.get_backend_config(self.group)  # such as cpu:gloo,cuda:nccl
        sender = dict(entry.split(":") for entry in backends.split(",")).get(q.device.type)
        if sender is None or (q.is_cuda and sender == "gloo"):
            needs = "nccl" if q.is_cuda else "gloo"
            raise ValueError(f"group must have {needs} for tensors on {q.device.type}, but has {backends}")
        B, Hq, Nq, d = q.shape
        if self.v.shape[3] != d:
            raise ValueError(f"v must have q's head dimension {d} in a ring, but has {self.v.shape[3]}")
        mine = {"B": B, "Hq": Hq, "Hkv": k.shape[1], "d": d, "q's length": Nq, "k's length": k.shape[2]}
        mine |= {"dtype": str(q.dtype).removeprefix("torch."), "device": q.device.type}
        mine |= {"causal": bool(self.causal), "window_size": [int(bound) for bound in self.window_size]}
        mine |= {name: None if x is None else float(x) for name, x in scores.items()}
        mine["softcap"] = mine["softcap"] or None
        mine["offset"] = None if self.offset is None else int(self.offset)
        mine["cu_seqlens_q"], mine["cu_seqlens_k"] = map(_documents_in_words, self.documents or (None, None))
        if self.documents and self.cu_seqlens_q is self.cu_seqlens_k:
            mine["cu_seqlens_k"] = "cu_seqlens_q itself"
        wants_gradients = any(x.requires_grad for x in (q, k, self.v))
        mine["requires_grad"] = torch.is_grad_enabled() and wants_gradients
        return mine

    def _check_documents(self) -> None:
        for name in "cu_seqlens_q", "cu_seqlens_k":
            x = getattr(self, name)
            if not isinstance(x, Tensor):
                was = _line(x)
                raise TypeError(f"{name} must be a tensor where the other one is given, but was {was}")
            is_dense = x.layout == torch.strided and not x.is_nested
            if not is_dense or x.dim() != 1 or len(x) < 2 or x.dtype not in _INTEGERS:
                what = (
                    f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}" if is_dense else "not dense"
                )
                raise ValueError(f"{name} must be (documents + 1,) of an integer dtype, but was {what}")
            if x.device != self.q.device:
                raise ValueError(f"{name} must be on q's device {self.q.device}, but is on {x.device}")
            if not x.is_cuda and bool((x[1:] < x[:-1]).any() or x[0] < 0):
                raise ValueError(f"{name} must be at least 0 and never decrease, but was {x.tolist()[:8]}")
        documents, others = len(self.cu_seqlens_q), len(self.cu_seqlens_k)
        if documents != others:
            raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's length {documents}, but has {others}")
        if self.q.shape[0] != 1:
            raise ValueError(f"q must have one batch with cu_seqlens_q, but has {self.q.shape[0]}")
        if self.offset is not None:
            raise ValueError(f"offset must be None with cu_seqlens_q, but was {self.offset}")

    def agreed(self, everyone: list[dict], Nq: int, Nk: int) -> Agreement:
        """What follows from all ranks' descriptions, of so many queries and keys in all."""
        if self.documents and not self.q.is_cuda:
            for name, N in ("cu_seqlens_q", Nq), ("cu_seqlens_k", Nk):
                end = int(getattr(self, name)[-1])
                if end > N:
                    raise ValueError(f"{name} must end at the whole length {N} or before, but ends at {end}")
        left, right = self.window_size
        offset = self.offset
        if self.documents:
            offset = 0
        elif offset is None:
            offset = Nk - Nq
        band = left, 0 if self.causal else right
        return Agreement(fingerprint(everyone), Mask(Nq, Nk, offset, band, None, len(everyone)))


@dataclass
class Agreement:
    """What the ranks agreed on in a call, for calls like that one."""

    fingerprint: int
    mask: Mask  # has no documents: their numbers may change from call to call
    parts: dict[tuple[int, int], Part | None] = field(default_factory=dict)


def _is_transformed() -> bool:
    """Whether tensors may be more than they show: in forward mode, or in a transform such as vmap."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


_INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


def is_timeout(x: object) -> bool:
    return isinstance(x, (int, float)) and 0 < x < 1e6


def fingerprint(said: object) -> int:
    """A number below 2^32 for what was said."""
    return int.from_bytes(hashlib.blake2b(json.dumps(said).encode(), digest_size=4).digest(), "little")


def check_same(everyone: list[dict], name: str) -> None:
    values = [its.get(name) for its in everyone]
    if any(value != values[0] for value in values):
        different = [value for i, value in enumerate(values) if value not in values[:i]]
        where = [named([rank for rank, its in enumerate(values) if its == value]) for value in different]
        was = " and ".join(f"{value} on {on}" for value, on in zip(different, where, strict=True))
        raise ValueError(f"{name} must be the same on all ranks, but was {was}")


def in_words(error: Exception) -> dict:
    """What a rank says instead of its arguments."""
    return {"error": [type(error).__name__, (str(error).splitlines() or [""])[0]]}


def raise_errors(everyone: list[dict]) -> None:
    for rank, its in enumerate(everyone):
        if "error" in its:
            kind, text = its["error"]
            raise ERRORS.get(kind, RuntimeError)(f"rank {rank}: {text}" if len(everyone) > 1 else text)


def totals(everyone: list[dict]) -> tuple[int, int]:
    """The lengths of the whole sequences of queries and keys, or the error that every rank raises."""
    raise_errors(everyone)
    ranks = len(everyone)
    lengths = "q's length", "k's length"
    for name in everyone[0]:
        if name not in lengths:
            check_same(everyone, name)
    found = []
    for name in lengths:
        values = [its[name] for its in everyone]
        N = sum(values)
        cut = [length(segments(N, rank, ranks)) for rank in range(ranks)]
        if values != cut:
            raise ValueError(f"{name} must be {cut}, as ring.shard cuts {N}, but was {values}")
        found.append(N)
    return found[0], found[1]


def _documents_in_words(x: Tensor | None) -> str | None:
    if x is None:
        return None
    words = f"{len(x) - 1} documents"
    if x.is_cuda:
        return words
    more = ", ..." * (len(x) > 8)
    checksum = zlib.crc32(x.long().numpy().tobytes())
    return f"{words} ({', '.join(map(str, x.tolist()[:8]))}{more}; checksum {checksum:08x})"


def _line(x: object) -> str:
    return (repr(x).splitlines() or [""])[0]
