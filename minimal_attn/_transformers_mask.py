"""Which keys a query of a transformers model sees, as arguments of forward.

What leads from a mask function to a layer's bounds:

    make_mask           once a model call: transformers' mask function and attention_mask become a Mask
    remember_factories  lets a mask function tell what made it
    keys_of             so: its window and its ranges of keys
    _from_tensor        the ranges of any other function, from its tensor
    _tokens_first       attention_mask has holes, or isn't known while tracing: the keys get another order
    Mask                the result; in a layer packed, by_positions and paged limit it to documents
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils.import_utils import is_tracing

from minimal_attn._varlen import keys_of_documents

_FACTORIES = (
    "and_masks or_masks sliding_window_overlay sliding_window_bidirectional_overlay chunked_overlay "
    "blockwise_overlay packed_sequence_mask_function remap_positions_for_packed_sequence"
).split()


def remember_factories():
    """Makes transformers' mask functions tell what made them: made_by = name, arguments.

    Dynamo can't look into their closures. They compute what they did before.
    """

    def remembering(make):
        @functools.wraps(make)
        def wrapped(*arguments, **named):
            function = make(*arguments, **named)
            if not named:
                function.made_by = make.__name__, arguments
            return function

        wrapped.of_minimal_attn = True
        return wrapped

    for name in _FACTORIES:
        make = getattr(masking_utils, name, None)  # 5.4 doesn't have all
        if make is not None and not hasattr(make, "of_minimal_attn"):
            setattr(masking_utils, name, remembering(make))


def _made_by(function):
    return getattr(function, "made_by", ("", ()))


class Documents(NamedTuple):
    """Documents that lie packed in the B x Nq queries and B x Nk keys of a call, row behind row."""

    cu_seq_lens_q: Tensor  #: (documents + 1,) of an integer dtype: where each begins, and where the last ends
    cu_seq_lens_k: Tensor
    max_length_q: int  #: at least the longest
    max_length_k: int

    def queries(self, n):
        """(token, position, ranges) of n queries: (1, n), (1, n) and (1, n, 2), as keys_of has them.

        A document's last query is at its last key. ranges are the keys of a query's document, if it has one.
        """
        _, token, begin, end = keys_of_documents(self.cu_seq_lens_q, self.cu_seq_lens_k, n)
        return token[None], (token - begin)[None], torch.stack((begin, end), -1)[None]


class Mask:
    """Which keys each query of one model call sees, as bounds instead of a tensor (B, 1, Nq, Nk).

    A model may compute with it: by operators, by functions of torch, by a tensor's methods. Then it is the
    tensor that transformers makes: bool, True where a key is seen. Where it is added to a tensor of floats,
    it is 0 there and torch.finfo(dtype).min elsewhere.

    Attributes:
        shape: (B, 1, Nq, Nk).
        window: window_size of minimal_attn.forward, None where `why` isn't None.
        bounds: seqlens_k, leftpad_k, offset and key_ranges of minimal_attn.forward, where they are needed.
        order: None, or (B, Nk): the order in which the bounds count the keys, tokens before padding. k and v
            are put in it first.
        documents: None, or Documents, in each of which the window applies. If there are bounds, only
            they count, for one row of all B Nq queries and B Nk keys.
        why: why no bounds say what this mask does, or None. Then it is a tensor, or is passed on.
        arguments: of transformers' mask functions, which make the tensor from them, if at all.
    """

    ndim = 4  # by which transformers knows that this is no padding mask
    dtype = torch.bool

    def __init__(self, arguments, window=None, bounds=None, why=None, documents=None, order=None):
        self.arguments, self.window, self.bounds, self.why = arguments, window, bounds or {}, why
        self.documents, self.order = documents, order
        self.shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        self.tensors = {}  # by dtype and options
        self.packings = []  # (arguments of packed or by_positions, the Mask that they made)

    @property
    def is_packed(self):
        """Whether each query has a range of keys of its own."""
        return self.documents is not None or "key_ranges" in self.bounds

    @property
    def is_moved(self):
        """Whether the bounds count keys in other places than the tensor."""
        return self.is_packed or self.order is not None

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
        """This mask within the documents that these arguments of a layer give. position_ids don't count.

        cu_seq_lens are read once a mask, which synchronises. So max_length is needed only while tracing.

        Raises:
            ValueError: they contradict the mask.
        """
        given = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        for known, mask in self.packings:
            if len(known) == len(given) and all(map(operator.is_, given, known)):
                return mask
        mask = self._packed(*given)
        self.packings.append((given, mask))
        return mask

    def by_positions(self, position_ids) -> Mask:
        """This mask within the documents of a layer's position_ids, as in transformers' flash route.

        That is so if B is 1, each key has a query, and there is no attention_mask. Else it is this mask.
        """
        B, _, Nq, Nk = self.shape
        is_row = isinstance(position_ids, Tensor) and position_ids.shape == (1, Nq) and B == 1
        if not is_row or Nq != Nk or Nq == 1 or self.arguments["attention_mask"] is not None:
            return self
        if is_tracing(position_ids):  # their values aren't known
            return self
        for known, mask in self.packings:
            if known[0] is position_ids:
                return mask
        mask, numbers = self, masking_utils.find_packed_sequence_indices(position_ids)
        if numbers is not None:
            function = _packed_function(self.arguments["mask_function"], numbers, position_ids)
            mask = make_mask(**self.arguments | dict(mask_function=function, allow_is_causal_skip=False))
        self.packings.append(((position_ids,), mask))
        return mask

    def paged(self, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k) -> Mask:
        """packed(...) for generate_batch, anew in each layer: it reads values only if a tensor is needed."""
        given = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k

        def inside(*indices):
            return self.packed(*given).arguments["mask_function"](*indices)

        arguments = self.arguments | dict(mask_function=inside, q_offset=0, allow_is_causal_skip=False)
        return Mask(arguments, self.window, documents=Documents(*given))

    def _packed(self, cu_q, cu_k, max_q, max_k):
        B, _, Nq, Nk = self.shape
        cu_q, cu_k = (cu.to(self.device) for cu in (cu_q, cu_k))
        is_known = not is_tracing(cu_q)
        if is_known:  # then _check_documents ensures that no padding is in a document
            max_q, max_k = self._check_documents(cu_q, cu_k)
        longest = (B * N if n is None else n for n, N in ((max_q, Nq), (max_k, Nk)))
        documents = Documents(cu_q, cu_k, *longest)
        token, position, limits = documents.queries(B * Nq)
        function, _, _ = without_documents(self.arguments["mask_function"])
        known = keys_of(function, token, position)
        if known is not None and known[1] is not None and known[1].shape[0] != 1:
            known = None  # it depends on the batch, but packed documents have one
        window, why, bounds = None, None, {}
        if known is None:
            why = f"mask function {_name(function)}"
        else:
            window, ranges = known
            limits = within_window(window, _intersection(ranges, limits), token)
            bounds = {} if ranges is None else _bounds_of(limits, 1)
        if not is_known and self.arguments["attention_mask"] is not None:
            why = "attention_mask's values aren't known while tracing"

        def inside(b, h, i, j):
            begin, end = limits.view(B, Nq, 2)[b, i].unbind(-1)
            key = b * Nk + j
            is_seen = (begin <= key) & (key < end)
            return is_seen & function(b, h, i, j) if known is None else is_seen

        arguments = self.arguments | dict(mask_function=inside, q_offset=0, kv_offset=0, use_vmap=False)
        arguments |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        if is_known:
            arguments["attention_mask"] = None
        return Mask(arguments, window, bounds, why, documents)

    def _check_documents(self, cu_q, cu_k):
        """The longest documents' lengths in q and k. Raises ValueError where cu_q, cu_k are impossible or
        contradict attention_mask.
        """
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
            is_token = pad(padding, (0, Nk - padding.shape[1])).flatten()
            n = pad(is_token.long().cumsum(0), (1, 0))
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
        bounds, order = moved(self.bounds), moved(dict(order=self.order))
        return Mask(arguments, self.window, bounds, self.why, documents, **order)

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


def _split(function, combination, factory):
    """(other, arguments) where function is combination(other, factory(*arguments)), else (function, None)."""
    name, parts = _made_by(function)
    if name != combination or len(parts) != 2 or _made_by(parts[1])[0] != factory:
        return function, None
    return parts[0], _made_by(parts[1])[1]


def without_documents(mask_function):
    """Takes transformers' mask function for packed position_ids apart.

    Returns:
        (function, numbers, positions): function doesn't know documents; numbers (B, N) count up, one for each
        token's document; positions (B, N) are those within documents, or None. Of another mask_function:
        (mask_function, None, None).
    """
    function, arguments = _split(mask_function, "and_masks", "packed_sequence_mask_function")
    if arguments is None:
        return mask_function, None, None
    [numbers] = arguments
    name, remapped = _made_by(function)
    if name == "remap_positions_for_packed_sequence":
        return remapped[0], numbers, remapped[1]
    return function, numbers, None


def _packed_function(function, numbers, position_ids):
    """What transformers makes of a mask function for packed position_ids. Blocks count by tokens."""
    remapped, blocks = _split(function, "or_masks", "blockwise_overlay")
    if remap := getattr(masking_utils, "remap_positions_for_packed_sequence", None):  # not in 5.17
        remapped = remap(remapped, position_ids)
    if blocks is not None:
        remapped = masking_utils.or_masks(remapped, masking_utils.blockwise_overlay(*blocks))
    return masking_utils.and_masks(remapped, masking_utils.packed_sequence_mask_function(numbers))


def keys_of(function, token, position=None):
    """(window_size, ranges) of a mask function that transformers made, None of another one.

    transformers' sliding_window counts keys: sliding_window - 1 before the query, and its own. All these
    functions let a token see itself.

    Args:
        token: (B or 1, Nq): the index of each query's own key.
        position: likewise, counted from the begin of its document: chunks begin there. None: chunks begin
            behind the padding.

    Returns:
        window_size as in forward, and ranges (B or 1, Nq, 2) or None: a query sees those keys of its window
        with begin <= j < end.
    """
    if function is causal_mask_function:
        return (-1, 0), None
    if function is bidirectional_mask_function:
        return (-1, -1), None
    name, arguments = _made_by(function)
    if name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
        n = arguments[0]
        if type(n) is not int or n < 1:
            return None
        return ((n - 1, -1) if name == "sliding_window_overlay" else (n, n)), None
    if name == "chunked_overlay":
        size, left = arguments
        begin = token - (token - left[:, None] if position is None else position) % size
        return (-1, -1), torch.stack((begin, begin + size), -1)
    if name == "remap_positions_for_packed_sequence":
        function, positions = arguments
        return keys_of(function, token, positions[:, token[0]] if position is None else position)
    function, block_ids = _split(function, "or_masks", "blockwise_overlay")
    if block_ids is not None:
        known, blocks = keys_of(function, token, position), _blocks(*block_ids, token)
        if known is None or blocks is None:
            return None
        begin, end = within_window(*known, token).unbind(-1)
        return (-1, -1), torch.stack((begin.minimum(blocks[..., 0]), end.maximum(blocks[..., 1])), -1)
    if name != "and_masks":
        return None
    parts = [keys_of(each, token, position) for each in arguments]
    if None in parts:
        return None
    windows = zip(*(window for window, _ in parts), strict=True)
    window = tuple(min([n for n in side if n >= 0] or [-1]) for side in windows)
    return window, functools.reduce(_intersection, (ranges for _, ranges in parts))


def _intersection(ranges, others):
    """The keys that are in both. Each is (B or 1, Nq, 2), or None for all keys."""
    if ranges is None or others is None:
        return others if ranges is None else ranges
    begins, ends = zip(ranges.unbind(-1), others.unbind(-1), strict=True)
    return torch.stack((torch.maximum(*begins), torch.minimum(*ends)), -1)


def within_window(window, ranges, token):
    """The ranges (B or 1, Nq, 2), or None for all keys, cut to the window of each query: (B or 1, Nq, 2)."""
    left, right = window
    begin = torch.zeros_like(token) if left < 0 else token - left
    end = torch.full_like(token, 1 << 30) if right < 0 else token + right + 1
    return _intersection(ranges, torch.stack((begin, end), -1))


def _runs(values):
    """(B, N, 2): begin and end of the run of equal values (B, N) in which a token is."""
    at = torch.arange(values.shape[1], device=values.device).expand(values.shape)
    run = pad(values.diff() != 0, (1, 0)).long().cumsum(1)
    begin = torch.full_like(at, values.shape[1]).scatter_reduce(1, run, at, "amin")
    end = torch.zeros_like(at).scatter_reduce(1, run, at + 1, "amax")
    return torch.stack((begin.gather(1, run), end.gather(1, run)), -1)


def _blocks(ids, token):
    """(B, Nq, 2): each query's block of equal ids (B, N), or only its own key where its id is negative.

    None: a block has gaps, or ids aren't known while tracing. This synchronises.
    """
    if is_tracing(ids):
        return None
    pairs = (ids, ids.sort(-1).values)
    n_runs, n_blocks = (((x >= 0) & pad(x.diff() != 0, (1, 0), value=True)).sum(-1) for x in pairs)
    if not torch.equal(n_runs, n_blocks):
        return None
    at = torch.arange(ids.shape[1], device=ids.device)[:, None]
    blocks = _runs(ids).where(ids[..., None] >= 0, torch.cat((at, at + 1), -1))
    return blocks[:, token[0].clamp(0, ids.shape[1] - 1)]


def _bounds_of(ranges, B):
    """forward's arguments for ranges (B or 1, Nq, 2)."""
    if ranges.shape[1] != 1:  # the kernels for few queries don't take key_ranges
        return {"key_ranges": ranges.int()}
    first, end = ranges.int().expand(B, -1, -1).unbind(-1)
    return {"leftpad_k": first[:, 0].contiguous(), "seqlens_k": end[:, 0].contiguous()}


def _from_tensor(arguments):
    """The Mask of an unknown function: ranges if its tensor has one in each row. This synchronises."""
    mask = Mask(arguments, why=f"mask function {_name(arguments['mask_function'])}")
    if torch.compiler.is_compiling() or 0 in mask.shape:
        return mask
    seen = mask.full_tensor()[:, 0]
    begins = seen & ~pad(seen, (1, 0))[..., :-1]
    if is_tracing(seen) or bool((begins.sum(-1) > 1).any()):
        return mask
    begin = seen.byte().argmax(-1)
    ranges = torch.stack((begin, begin + seen.sum(-1)), -1)
    return Mask(arguments, (-1, -1), _bounds_of(ranges, len(seen)))


def _tokens_first(arguments, ranges, padding):
    """The Mask of ranges (B or 1, Nq, 2) in a new order of the keys: tokens first, then padding.

    padding (B, Nk) is True where there is a token. Its holes split no range then, and its values needn't be
    known.
    """
    B, Nk = padding.shape
    n = pad(padding.cumsum(1), (1, 0))  # how many tokens lie before a key
    ranges = ranges.expand(B, -1, -1).clamp(0, Nk)
    ranges = n.gather(1, ranges.flatten(1)).view(ranges.shape)
    order = (~padding).byte().argsort(stable=True)
    return Mask(arguments, (-1, -1), _bounds_of(ranges, B), order=order)


def make_mask(**arguments) -> Mask:
    """The Mask of a model call: transformers' AttentionMaskInterface.

    Args:
        arguments: those of transformers.masking_utils.sdpa_mask. attention_mask is None or (B, Nk) bool, True
            where there is a token. Its values are read once, which synchronises, as sdpa_mask does.

    Returns:
        A Mask. Its `why` is None where the kernels can take it: each query sees one range of the tokens.
        Windows, chunks, documents and blocks are known by transformers' functions. Of other functions the
        tensor is made, as sdpa_mask does, and looked at once, which synchronises.
    """
    padding, Nk = arguments["attention_mask"], arguments["kv_length"]
    if isinstance(padding, Mask):  # generate() made it before, for a StaticCache
        return padding
    B, Nq, device = arguments["batch_size"], arguments["q_length"], arguments["device"]
    q_offset, kv_offset = arguments["q_offset"], arguments["kv_offset"]
    if padding is not None and (padding.ndim != 2 or padding.shape[0] != B or isinstance(kv_offset, Tensor)):
        return Mask(arguments, why=f"attention_mask of shape {tuple(padding.shape)}")
    token = torch.arange(Nq, device=device)[None] + q_offset
    function, numbers, position = without_documents(arguments["mask_function"])
    known = keys_of(function, token, None if position is None else position[:, token[0]])
    if known is None or (numbers is not None and arguments.get("use_vmap")):  # then numbers may not count up
        return _from_tensor(arguments)
    window, ranges = known
    if numbers is not None:
        ranges = _intersection(ranges, _runs(numbers)[:, token[0]])
    has_left = has_right = False
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + Nk].bool()
        padding = pad(padding, (0, Nk - padding.shape[1]))  # True where there is a token
        may_have_holes = is_tracing(padding)
        if not may_have_holes:
            runs = (padding & ~pad(padding, (1, 0))[:, :-1]).sum(-1)
            first = padding.int().argmax(-1) if Nk else runs
            end = first + padding.sum(-1)
            facts = torch.stack([(runs > 1).any(), first.any(), (end < Nk).any()])
            may_have_holes, has_left, has_right = facts.tolist()
        if may_have_holes:
            return _tokens_first(arguments, within_window(window, ranges, token) - kv_offset, padding)
    if ranges is not None:
        limits = None if padding is None else torch.stack((first, end), -1)[:, None]
        ranges = _intersection(within_window(window, ranges, token) - kv_offset, limits)
        return Mask(arguments, (-1, -1), _bounds_of(ranges, B))
    offset = q_offset - kv_offset
    is_full = not isinstance(offset, Tensor) and offset == Nk - Nq  # no cache, or one without free keys
    if isinstance(offset, Tensor):
        offset = offset.to(device, torch.int32).expand(B).contiguous()
    elif Nq == 1 and not is_full:  # not an int, for which each step would be another CUDA graph
        offset = torch.full((B,), offset, dtype=torch.int32, device=device)
    bounds = {} if window == (-1, -1) else {"offset": offset}
    # The same arguments for every step of a StaticCache: it is compiled once.
    if has_left or (padding is not None and not is_full):
        bounds["leftpad_k"] = first.int()
    if has_right or (padding is not None and not is_full):
        bounds["seqlens_k"] = end.int()
    return Mask(arguments, window, bounds)


def _name(function):
    """A mask function's name for `calls`: the function that made it, and its arguments."""
    name, arguments = _made_by(function)
    if not name and torch.compiler.is_compiling():
        return "a function"
    name = name or getattr(function, "__qualname__", type(function).__name__).split(".<locals>")[0]
    parts = [_name(each) for each in arguments if callable(each)]
    return f"{name}({', '.join(parts)})" if parts else name
