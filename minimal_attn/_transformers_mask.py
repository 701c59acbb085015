"""Which keys a query of a transformers model sees, as bounds of minimal_attn.forward: Mask and make_mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.masking_utils import and_masks, bidirectional_mask_function, causal_mask_function
from transformers.utils.import_utils import is_tracing

# A closure is known by its code, which all closures of one function share.
_AND = and_masks(causal_mask_function).__code__
_LEFT = masking_utils.sliding_window_overlay(1).__code__
_BOTH = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_SAME = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_REMAPPED = None  # 5.4 has no such function
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
    _REMAPPED = masking_utils.remap_positions_for_packed_sequence(None, None).__code__


class Documents(NamedTuple):
    """Documents that lie packed in the B x Nq queries and B x Nk keys of a call, row behind row."""

    cu_seq_lens_q: Tensor  #: (documents + 1,) of an integer dtype: where each begins, and where the last ends
    cu_seq_lens_k: Tensor
    max_length_q: int  #: at least the longest
    max_length_k: int

    @classmethod
    def by_number(cls, numbers):
        """The documents of (B, N) tokens, given the number of each token's document. This synchronises.

        A document ends where the number changes, or the row ends.
        """
        is_first = torch.ones_like(numbers, dtype=torch.bool)
        is_first[:, 1:] = numbers.diff() != 0
        begin = is_first.flatten().nonzero()[:, 0]
        cu = torch.nn.functional.pad(begin, (0, 1), value=numbers.numel()).int()
        longest = int(cu.diff().max())
        return cls(cu, cu, longest, longest)

    def mask_function(self, function, B, Nq, Nk, is_remapped):
        """transformers' mask function `function`, limited to these documents.

        `function` gets positions in the document, where the last query is at the last key. With is_remapped
        it gets indices and finds the positions itself.
        """

        def place(cu, N):
            token = torch.arange(B * N, device=cu.device)
            document = torch.searchsorted(cu[1:].long(), token, right=True)
            is_inside = (document < len(cu) - 1) & (token >= cu[0])
            document = document.clamp(max=len(cu) - 2)
            position = token - cu[1:][document] + self.cu_seq_lens_k.diff()[document]
            return document.where(is_inside, -1).view(B, N), position.view(B, N)

        document_q, position_q = place(self.cu_seq_lens_q, Nq)
        document_k, position_k = place(self.cu_seq_lens_k, Nk)

        def inside(b, h, i, j):
            is_same = (document_q[b, i] == document_k[b, j]) & (document_q[b, i] >= 0)
            if not is_remapped:
                i, j = position_q[b, i], position_k[b, j]
            return is_same & function(b, h, i, j)

        return inside


class Mask:
    """Which keys each query of one model call sees, as bounds instead of a tensor (B, 1, Nq, Nk).

    A model may compute with it: by operators, by functions of torch, by a tensor's methods. Then it is the
    tensor that transformers makes: bool, True where a key is seen. Where it is added to a tensor of floats,
    it is 0 there and torch.finfo(dtype).min elsewhere.

    Attributes:
        shape: (B, 1, Nq, Nk).
        window: window_size of minimal_attn.forward, None where `why` isn't None.
        bounds: seqlens_k, leftpad_k and offset of minimal_attn.forward, where they are needed.
        documents: None, or Documents: the window then applies to each of them, and there are no bounds.
        why: why the kernels can't take this mask, or None.
        arguments: of transformers' mask functions, which make the tensor from them, if at all.
    """

    ndim = 4  # by which transformers knows that this is no padding mask
    dtype = torch.bool

    def __init__(self, arguments, window=None, bounds=None, why=None, documents=None):
        self.arguments, self.window, self.bounds, self.why = arguments, window, bounds or {}, why
        self.documents = documents
        self.shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        self.tensors, self.packings = {}, []

    def tensor(self, dtype=torch.bool):
        """The mask as transformers has it, made once: bool for its sdpa function, else to add to scores.

        None where every key is seen; for bool also where sdpa's is_causal is enough.
        """
        return self._made(dtype)

    def full_tensor(self, dtype=torch.bool):
        """tensor(dtype), but never None."""
        return self._made(dtype, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)

    def _made(self, dtype, **options):
        key = dtype, *options
        if key not in self.tensors:
            make = masking_utils.sdpa_mask if dtype == torch.bool else masking_utils.eager_mask
            self.tensors[key] = make(**{**self.arguments, "dtype": dtype, **options})
        return self.tensors[key]

    def packed(self, cu_seq_lens_q, cu_seq_lens_k, max_length_q=None, max_length_k=None) -> Mask:
        """This mask, limited to the documents that these arguments of a layer give. position_ids don't count.

        Their numbers are read once a mask, which synchronises. So max_length is needed only while tracing.

        Raises:
            ValueError: they contradict the mask.
        """
        given = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        for known, mask in self.packings:
            if all(x is y for x, y in zip(given, known, strict=True)):
                return mask
        mask = self._packed(*given)
        self.packings.append((given, mask))
        return mask

    def _packed(self, cu_q, cu_k, max_q, max_k):
        B, _, Nq, Nk = self.shape
        cu_q, cu_k = (cu.to(self.device) for cu in (cu_q, cu_k))
        is_known = not is_tracing(cu_q)
        if is_known:  # the check ensures that all padding is outside of the documents
            max_q, max_k = self._check_documents(cu_q, cu_k)
        longest = (B * N if n is None else n for n, N in ((max_q, Nq), (max_k, Nk)))
        documents = Documents(cu_q, cu_k, *longest)
        function, _ = without_documents(self.arguments["mask_function"])
        window, why = window_of(function), None
        if window is None:
            why = f"mask function {_name(function)}"
        elif not is_known and self.arguments["attention_mask"] is not None:
            why = "attention_mask's values aren't known while tracing"
        is_remapped = not is_known and window is None  # while tracing, closures can't be read: it may be
        inside = documents.mask_function(function, B, Nq, Nk, is_remapped)
        arguments = self.arguments | dict(mask_function=inside, q_offset=0, kv_offset=0)
        arguments |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        if is_known:
            arguments["attention_mask"] = None
        return Mask(arguments, None if why else window, why=why, documents=documents)

    def _check_documents(self, cu_q, cu_k):
        """The longest lengths. Raises ValueError where the documents can't be, or contradict the mask."""
        B, _, Nq, Nk = self.shape
        if cu_q.shape != cu_k.shape or cu_q.ndim != 1 or len(cu_q) < 2:
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k must have one shape (documents + 1,), but have the shapes "
                f"{tuple(cu_q.shape)} and {tuple(cu_k.shape)}"
            )
        both = (cu_q, "q", "queries", B * Nq), (cu_k, "k", "keys", B * Nk)
        facts = torch.stack([x for cu, *_ in both for x in (cu[0], cu[-1], *cu.diff().aminmax())])
        facts = facts.view(2, 4).tolist()
        for (cu, name, what, total), (first, last, shortest, _) in zip(both, facts, strict=True):
            if first < 0 or shortest < 0 or last > total or (Nq != Nk and last != total):
                raise ValueError(
                    f"cu_seq_lens_{name} must rise from 0 to {total}, the number of {what}, but was "
                    f"{cu.tolist()}"
                )
        padding, at = self.arguments["attention_mask"], int(self.arguments["kv_offset"])
        if padding is not None:
            padding = padding[:, at : at + Nk].bool()
            is_token = torch.nn.functional.pad(padding, (0, Nk - padding.shape[1])).flatten()
            n = torch.nn.functional.pad(is_token.long().cumsum(0), (1, 0))
            cu = cu_k.long()
            tokens, lengths = n[cu].diff(), cu.diff()
            is_left_out = n[-1] != n[cu[-1]] - n[cu[0]]
            if bool(is_left_out | ((tokens != 0) & (tokens != lengths)).any()):
                raise ValueError(
                    "cu_seq_lens_k and attention_mask must agree, but a document has padding, or a token is "
                    "in no document: leave attention_mask out of a packed batch"
                )
        return [longest for *_, longest in facts]

    def to(self, *target, **options):
        """The same mask on another device, as accelerate wants it between layers; the tensor in a dtype."""
        if any(isinstance(x, (torch.dtype, Tensor)) for x in (*target, *options.values())):
            return self.full_tensor().to(*target, **options)

        def moved(values):
            return {n: x.to(*target, **options) if isinstance(x, Tensor) else x for n, x in values.items()}

        arguments = moved(self.arguments)
        arguments["device"] = torch.empty(0, device=self.device).to(*target, **options).device
        documents = self.documents and Documents(**moved(self.documents._asdict()))
        return Mask(arguments, self.window, moved(self.bounds), self.why, documents)

    @property
    def device(self):
        return torch.device(self.arguments["device"])

    def contiguous(self):
        """Itself. transformers 5.20 asks a StaticCache's mask for it, whatever its type."""
        return self

    def __getitem__(self, index):
        """A Mask for some of the queries, mask[:, :, i:j, :], else the tensor's part.

        Gemma 4 computes its last layers for those queries alone.
        """
        everything = slice(None)
        if isinstance(index, tuple) and [*index[:2], *index[3:]] == [everything] * 3:
            rows = range(self.shape[2])[index[2]]
            if isinstance(rows, range) and rows.step == 1:
                first = dict(self.arguments, q_offset=self.arguments["q_offset"] + rows.start)
                return make_mask(**first | {"q_length": len(rows), "allow_is_causal_skip": False})
        return self.full_tensor()[index]

    def __getattr__(self, name):
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"minimal_attn's mask has no {name}")
        return getattr(self.full_tensor(), name)

    def __repr__(self):
        of = f", documents={self.documents}" if self.documents else ""
        return f"Mask(shape={self.shape}, window={self.window}, bounds={self.bounds}{of}, why={self.why!r})"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtype = torch.bool
        if getattr(function, "__name__", "").strip("_") in ("add", "radd", "iadd"):
            others = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()]
            dtype = others[0] if others else dtype
        args, kwargs = tree_map(lambda x: x.full_tensor(dtype) if isinstance(x, Mask) else x, (args, kwargs))
        return function(*args, **kwargs)

    def __add__(self, other):
        return torch.add(self, other)

    __radd__ = __add__
    __hash__ = object.__hash__


def _operator(name):
    return lambda self, *others: getattr(self.full_tensor(), name)(*others)


for _stem in "sub mul truediv and or xor".split():
    for _which in (f"__{_stem}__", f"__r{_stem}__"):
        setattr(Mask, _which, _operator(_which))
for _stem in "eq ne lt le gt ge invert".split():
    setattr(Mask, f"__{_stem}__", _operator(f"__{_stem}__"))


def without_documents(mask_function):
    """(function, numbers) of transformers' mask function for packed position_ids, else (mask_function, None).

    `function` takes positions in the document; numbers (B, N) are each token's document.
    """
    if torch.compiler.is_compiling() or getattr(mask_function, "__code__", None) is not _AND:
        return mask_function, None
    [parts] = [cell.cell_contents for cell in mask_function.__closure__]
    if len(parts) != 2 or getattr(parts[1], "__code__", None) is not _SAME:
        return mask_function, None
    function, same = parts
    [numbers] = [cell.cell_contents for cell in same.__closure__]
    if getattr(function, "__code__", None) is _REMAPPED:
        [function] = [x for cell in function.__closure__ if callable(x := cell.cell_contents)]
    return function, numbers


def window_of(mask_function):
    """window_size of one of transformers' mask functions, or None where it isn't known to be a window.

    transformers' sliding_window counts keys: sliding_window - 1 before the query, and its own.
    """
    if mask_function is causal_mask_function:
        return -1, 0
    if mask_function is bidirectional_mask_function:
        return -1, -1
    if torch.compiler.is_compiling():  # Dynamo can't look into a closure
        return None
    code = getattr(mask_function, "__code__", None)
    if code is None or code not in (_AND, _LEFT, _BOTH):
        return None
    [inside] = [cell.cell_contents for cell in mask_function.__closure__]
    if code is not _AND:
        if type(inside) is not int or inside < 1:
            return None
        return (inside - 1, -1) if code is _LEFT else (inside, inside)
    windows = [window_of(function) for function in inside]
    if None in windows:
        return None
    return tuple(min((w[side] for w in windows if w[side] >= 0), default=-1) for side in (0, 1))


def make_mask(**arguments) -> Mask:
    """The Mask of a model call: transformers' AttentionMaskInterface.

    Args:
        arguments: those of transformers.masking_utils.sdpa_mask. attention_mask is None or (B, Nk) bool, True
            where there is a token. Its values are read once, which synchronises, as sdpa_mask does.

    Returns:
        A Mask. Its `why` is None where the kernels can take it: all keys, the causal ones or a window of
        either, and each row of attention_mask is one run of tokens with padding before and after it, or the
        mask function is transformers' for packed position_ids.
    """
    padding, Nk = arguments["attention_mask"], arguments["kv_length"]
    if isinstance(padding, Mask):  # generate() made it before, for a StaticCache
        return padding
    B, Nq, device = arguments["batch_size"], arguments["q_length"], arguments["device"]
    kv_offset = arguments["kv_offset"]
    function, numbers = without_documents(arguments["mask_function"])
    window = window_of(function)
    if window is None or (numbers is not None and (Nq != Nk or padding is not None)):
        return Mask(arguments, why=f"mask function {_name(arguments['mask_function'])}")
    if numbers is not None:
        return Mask(arguments, window, documents=Documents.by_number(numbers.expand(B, -1)))
    offset = arguments["q_offset"] - kv_offset
    is_grown = not isinstance(offset, Tensor) and offset == Nk - Nq  # a cache without free keys, or none
    if isinstance(offset, Tensor):
        offset = offset.to(device, torch.int32).expand(B).contiguous()
    elif Nq == 1 and not is_grown:  # not an int, for which each step would be another CUDA graph
        offset = torch.full((B,), offset, dtype=torch.int32, device=device)
    bounds = {} if window == (-1, -1) else {"offset": offset}
    if padding is None:
        return Mask(arguments, window, bounds)
    if padding.ndim != 2 or padding.shape[0] != B or isinstance(kv_offset, Tensor):
        return Mask(arguments, why=f"attention_mask of shape {tuple(padding.shape)}")
    if is_tracing(padding):
        return Mask(arguments, why="attention_mask's values aren't known while tracing")
    padding = padding[:, kv_offset : kv_offset + Nk].bool()  # beyond its end is padding
    before = torch.nn.functional.pad(padding, (1, 0))[:, :-1]
    runs = (padding & ~before).sum(-1)
    first = padding.int().argmax(-1) if padding.shape[1] else runs
    end = first + padding.sum(-1)
    has_holes, has_left, has_right = torch.stack([(runs > 1).any(), first.any(), (end < Nk).any()]).tolist()
    if has_holes:
        return Mask(arguments, why="holes in attention_mask")
    if has_left or not is_grown:  # the same arguments for every step of a StaticCache: it is compiled once
        bounds["leftpad_k"] = first.int()
    if has_right or not is_grown:
        bounds["seqlens_k"] = end.int()
    return Mask(arguments, window, bounds)


def _name(function):
    """A mask function's name for `calls`: the function that made it, and its arguments."""
    if torch.compiler.is_compiling():
        return "made while tracing"
    name = getattr(function, "__qualname__", type(function).__name__).split(".<locals>")[0]
    inside = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    parts = [_name(f) for x in inside for f in (x if isinstance(x, tuple) else (x,)) if callable(f)]
    return f"{name}({', '.join(parts)})" if parts else name
