"""minimal_attn as an attention implementation of Hugging Face transformers.

    import minimal_attn.huggingface
    minimal_attn.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="minimal_attn")

A model asks transformers for its mask once a call. Here it gets a Mask: bounds (leftpad_k, seqlens_k, offset,
a window, key_ranges) instead of an Nq x Nk tensor. Each layer passes them to the kernel. transformers' mask
functions tell windows, chunks, documents and image blocks. Of any other function the tensor is made and
looked at, once a call; without a range of keys in each row it is forward's attn_mask. What the kernels can't
compute goes to transformers' own functions: sdpa's, or the model's eager one where sdpa can't do it either.
`calls` counts both kinds of calls, by reason, and a minimal_attn.FallbackWarning names each reason once.
register(strict=True) makes it an error. An argument with an unknown meaning is an error, too.

Under torch.compile attention_mask's values aren't known. There, and for padding with holes, each layer copies
k and v into another order: tokens before padding.

Packed batches. cu_seq_lens_q and cu_seq_lens_k say which tokens are one document, in each layer that gets
them. DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them, for example. Without them a
document begins where position_ids don't count on, as in transformers' flash route. The call must have
no attention_mask, and the model must pass position_ids to transformers' mask functions or to its layers.
GraniteMoeHybrid passes them to neither. There, and in compiled code with a cache, documents see each other,
as they do with transformers' "sdpa" and "eager".

model.generate_batch (continuous batching) keeps "minimal_attn", where transformers serves "sdpa" or flash.

Models that don't ask transformers' AttentionInterface (BLOOM, Falcon, GPT-Neo, SAM's vision encoder and
others) get the attention that they have for "sdpa", else "eager", with that warning. Where it is "sdpa",
minimal_attn.activate() can serve its calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections import Counter

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal_attn
from minimal_attn._backward import has_fast_backward, has_fast_bias_gradient, has_fast_pairs
from minimal_attn._fallback import passed_on
from minimal_attn._forward import cast_by_autocast
from minimal_attn.flash_attn import flash_attn_varlen_func

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("minimal_attn.huggingface needs transformers, which isn't installed") from None
try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    from minimal_attn._transformers_mask import (
        Mask,
        _name,
        keys_of,
        make_mask,
        remember_factories,
        within_window,
        without_documents,
    )
except ImportError as error:
    raise ImportError(f"minimal_attn.huggingface needs a newer transformers ({error})") from None

__all__ = ["Mask", "attention", "calls", "make_mask", "register"]

#: How many calls of an attention layer the kernels served (the key "served"), and how many went to
#: transformers' functions (the key says why). calls.clear() starts again. Compiled code is counted when it is
#: traced.
calls: Counter[str] = Counter()

_strict = False  # the last register(strict=...)

# Arguments of an attention layer that don't change its result, since its mask decides.
_HARMLESS = set(
    "position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits "
    "labels return_dict num_items_in_batch logits_to_keep sliding_window layer_idx deterministic "
    "cache seq_idx max_length_q max_length_k".split()
)
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Arguments that generate_batch passes to a layer. The kernels don't need them: k and v are already gathered.
_PAGED = {"read_index", "write_index", "logits_indices", "logits_processor_args", "cache"}
_OTHERS = 'load the model with attn_implementation="sdpa" or "eager"'


class _Running(threading.local):
    """What is known of the models whose forward runs in this thread."""

    def __init__(self):
        self.documents: list[Tensor | None] = []  # cu_seq_lens_q of each, the innermost model last


_running = _Running()


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """One layer's attention, by the kernels or by transformers' functions: its AttentionInterface.

    Args:
        module: the layer.
        query: (B, Hq, Nq, d); key (B, Hkv, Nk, d); value (B, Hkv, Nk, d_v).
        attention_mask: the Mask of this model call. A tensor is forward's attn_mask on a CPU, and in half
            types on Hopper; elsewhere it goes to transformers' functions. None: every key is seen, but in a
            causal layer with several queries transformers' functions know what it means.
        scaling: None is 1 / sqrt(d).
        options: as transformers passes them. position_bias (T5) is forward's bias where a tensor would be.
            cu_seq_lens_q and cu_seq_lens_k (documents + 1,) say where documents begin in the B x Nq queries
            and B x Nk keys, and where the last one ends.
        s_aux: attention sinks (Hq,): a score each that takes part in the softmax and has no value (gpt-oss).
        dropout, is_causal: as transformers passes them.

    Returns:
        o (B, Nq, Hq, d_v), contiguous, of query's dtype, or autocast's where that is on; the weights or None.

    Raises:
        ValueError: an argument that neither the kernels nor transformers' functions for this layer know, or
            cu_seq_lens that contradict the mask.
        RuntimeError: the kernels can't serve this call, after register(strict=True).
    """
    q, k, v = cast_by_autocast(query, key, value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = {name: x for name, x in options.items() if x is not None}
    mask = _in_documents(module, attention_mask, q, k, causal, options)
    mask = _of_indices(mask, q, k, options)
    mask = _as_tensor(mask, q, k, v, options)
    why = _why_not(q, k, v, mask, causal, scaling, dropout, s_aux, options)
    _count(why or "served")
    if why:
        known = dict(scaling=scaling, dropout=dropout, is_causal=is_causal, s_aux=s_aux)
        options |= {name: x for name, x in known.items() if x is not None}
        return _pass_on(module, query, key, value, mask, options)
    bounds = mask.bounds if isinstance(mask, Mask) else {}
    window = mask.window if isinstance(mask, Mask) else (-1, -1)
    if isinstance(mask, Mask) and mask.order is not None:
        order = mask.order[:, None, :, None]  # take_along_dim would fix all sizes of a traced graph
        k, v = (x.gather(2, order.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))
    fixed = dict(window_size=window, softmax_scale=scaling, softcap=options.get("softcap"))
    fixed["dropout_p"] = dropout
    if isinstance(mask, Tensor):
        fixed["attn_mask"] = mask
    if (bias := options.get("position_bias")) is not None:
        is_added = isinstance(mask, Tensor) and mask.dtype != torch.bool
        fixed["attn_mask" if is_added else "bias"] = mask + bias if is_added else bias
    if isinstance(mask, Mask) and mask.documents:
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        if bounds:
            q, k, v = (x.transpose(0, 1)[None] for x in rows)
            del fixed["window_size"]  # bounds have it
            o = minimal_attn.forward(q, k, v, sinks=s_aux, **fixed, **bounds)[0].transpose(0, 1)
        else:
            o = flash_attn_varlen_func(*rows, *mask.documents, s_aux=s_aux, **fixed)
        return o.unflatten(0, (query.shape[0], query.shape[2])).contiguous(), None
    o = minimal_attn.forward(q, k, v, sinks=s_aux, **fixed, **bounds)
    return o.transpose(1, 2).contiguous(), None


def _in_documents(module, mask, q, k, causal, options):
    """The mask, limited to the documents of cu_seq_lens if options have them. Removes these from options."""
    if "cu_seq_lens_q" not in options and "cu_seq_lens_k" not in options:
        if isinstance(mask, Mask) and without_documents(mask.arguments["mask_function"])[1] is None:
            _check_running(module, q)
            return mask.by_positions(options.get("position_ids"))
        return mask
    given = {name: options.pop(name, None) for name in _PACKED}
    for name in _PACKED[:2]:
        if given[name] is None:
            raise ValueError(f"cu_seq_lens_q and cu_seq_lens_k must be given together, but {name} is None")
        if not isinstance(given[name], Tensor) or given[name].is_floating_point():
            was = given[name].dtype if isinstance(given[name], Tensor) else type(given[name]).__name__
            raise TypeError(f"{name} must be a tensor of an integer dtype, but was {was}")
    if "indices" in options:
        raise ValueError(
            f"cu_seq_lens_q must be None in {type(module).__name__}, whose choice of keys ignores documents"
        )
    if isinstance(mask, Mask):
        return mask.packed(**given)
    is_paged = "read_index" in options
    if mask is None and "sliding_window" in options and not is_paged:
        raise ValueError(f"packed sequences need a mask in {type(module).__name__}: {_OTHERS}")
    function = causal_mask_function if causal and mask is None else bidirectional_mask_function
    if is_paged and (window := options.get("sliding_window") or _window_of_cache(module)):
        function = masking_utils.sliding_window_causal_mask_function(window)
    sizes = dict(batch_size=q.shape[0], q_length=q.shape[2], kv_length=k.shape[2])
    sizes |= dict(q_offset=k.shape[2] - q.shape[2], kv_offset=0, attention_mask=None, device=q.device)
    whole = Mask(dict(sizes, mask_function=function), keys_of(function, None)[0])
    if is_paged:
        for name in _PAGED & options.keys():
            del options[name]
        return whole.paged(**given)
    documents = whole.packed(**given)
    return documents if mask is None else _both(mask, documents.full_tensor())


def _window_of_cache(module):
    """A layer's window in generate_batch's cache, or None. PhiMoE and Qwen2-MoE don't pass it."""
    config = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is not None and (layer is None or kinds[layer] != "sliding_attention"):
        return None
    return getattr(config, "sliding_window", None)


def _check_running(module, q):
    """Raises ValueError where a model got cu_seq_lens, but does not give them to its layers."""
    if torch.compiler.is_compiling():
        return
    tokens = q.shape[0] * q.shape[2]
    # With another number of tokens the layer may be one of another model, such as an encoder.
    if any(cu is not None and tokens == int(cu[-1]) for cu in _running.documents):
        raise ValueError(
            f"cu_seq_lens_q must be None, since this model does not give it to {type(module).__name__}: "
            "pass position_ids with use_cache=False instead"
        )


def _of_indices(mask, q, k, options):
    """The mask without the keys that are not in options' indices (B, Nq, n). Removes these from options.

    Models with sparse attention, such as DeepSeek-V3.2, give indices to any function but "sdpa" and "eager".
    """
    indices = options.get("indices")
    if mask is None or indices is None or indices.shape[:-1] != (q.shape[0], q.shape[2]):
        return mask
    del options["indices"]
    seen = torch.zeros(*indices.shape[:2], k.shape[2] + 1, dtype=torch.bool, device=indices.device)
    seen = seen.scatter(-1, indices.long().where(indices >= 0, k.shape[2]), True)  # -1 is no key
    return _both(mask, seen[:, None, :, :-1])


def _as_tensor(mask, q, k, v, options):
    """A Mask's tensor if the kernels take that but not its bounds, else the mask.

    Bounds may count keys in another order, or those of all rows. A position_bias has them in their places.
    """
    if not isinstance(mask, Mask) or not has_fast_pairs(q, v):
        return mask
    if not (mask.why or (mask.is_moved and "position_bias" in options)):
        return mask
    tensor = mask.full_tensor()
    return tensor if _is_served(q, k, v, tensor) else mask


def _both(mask, seen):
    """The tensor of a mask that also hides the keys where `seen` is False."""
    tensor = mask.full_tensor() if isinstance(mask, Mask) else mask
    if tensor.dtype == torch.bool:
        return tensor & seen
    return tensor.masked_fill(~seen, torch.finfo(tensor.dtype).min)


def _why_not(q, k, v, mask, causal, scaling, dropout, s_aux, options):
    """Why the kernels can't compute this call, or None."""
    if dropout and not _is_dropout_served(q, v, mask):
        return "dropout"
    if options.get("output_attentions"):
        return "output_attentions"
    for name in options:
        if name not in _HARMLESS and name not in ("softcap", "position_bias"):
            return f"argument {name}"
    is_packed = isinstance(mask, Mask) and mask.is_packed
    wants_grad = any(t is not None and t.requires_grad for t in (q, k, v, s_aux))
    keeps_memory = is_packed or "softcap" in options  # elsewhere they are N x N matrices
    if wants_grad and torch.is_grad_enabled() and not (keeps_memory or _strict or has_fast_backward(q, v)):
        return "gradients, which PyTorch's kernels compute faster on this GPU"
    if isinstance(mask, Mask):
        if mask.why:
            return mask.why
        if mask.shape != (q.shape[0], 1, q.shape[2], k.shape[2]):
            return "a mask of another shape"
    elif mask is not None and not _is_served(q, k, v, mask):
        return "a mask that is a tensor"
    elif mask is None and ("sliding_window" in options or (causal and q.shape[2] != 1)):
        return "no mask in a layer that is causal or has a window"
    if (bias := options.get("position_bias")) is not None:
        is_moved = isinstance(mask, Mask) and mask.is_moved
        if is_moved or bias.dtype == torch.bool or not _is_served(q, k, v, bias):
            return "argument position_bias"
    if not (scaling is None or isinstance(scaling, (int, float))):
        return "a scale that is a tensor"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "dtypes"
    if q.device.type not in ("cpu", "cuda"):
        return f"device {q.device.type}"
    if q.ndim != 4 or q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
        return "shapes"
    if max(k.shape[3], v.shape[3]) > (256 if q.is_cuda and q.dtype == torch.float32 else 512):
        return "head dimension"
    return None


def _is_dropout_served(q, v, mask):
    """As in binding/serving.h: on a GPU PyTorch's kernels are faster without a mask and with d up to 128."""
    is_wide = max(q.shape[-1], v.shape[-1]) > 128
    return has_fast_pairs(q, v) and (q.device.type == "cpu" or mask is not None or is_wide)


def _is_served(q, k, v, mask):
    """Whether the kernels take a mask or bias as it is, and are fast, its gradient included."""
    pairs = (*q.shape[:3], k.shape[2])
    fits = mask.ndim == 4 and all(n in (1, of) for n, of in zip(mask.shape, pairs, strict=True))
    wants_grad = mask.requires_grad and torch.is_grad_enabled()
    has_dtype = mask.dtype in (torch.bool, torch.float32, q.dtype)
    is_fast = has_fast_pairs(q, v) and (not wants_grad or has_fast_bias_gradient(q, k, v))
    return fits and has_dtype and is_fast


def _pass_on(module, query, key, value, mask, options):
    """The call by transformers' sdpa function or, where that lacks an option, by the model's eager one."""
    special = options.keys() - _HARMLESS - {"scaling", "dropout", "is_causal"}
    if special <= {"position_bias"} and not options.get("output_attentions"):
        tensor = mask.tensor() if isinstance(mask, Mask) else mask
        with _sdpa_kernels(query, tensor):
            return sdpa_attention_forward(module, query, key, value, tensor, **options)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    # Sinks are the layer's own parameter, and there its eager function reads them.
    unknown = special - {"s_aux"} - set(inspect.signature(eager).parameters if eager else ())
    if eager is None or unknown:
        what = f"its argument {min(unknown)}" if unknown else "this call"
        raise ValueError(f"{type(module).__name__}: minimal_attn doesn't know {what}: {_OTHERS}")
    tensor = mask.tensor(query.dtype) if isinstance(mask, Mask) else mask
    if isinstance(tensor, Tensor) and tensor.dtype == torch.bool:
        low = torch.finfo(query.dtype).min
        tensor = torch.zeros_like(tensor, dtype=query.dtype).masked_fill(~tensor, low)
    return eager(module, query, key, value, tensor, **options)


def _sdpa_kernels(query, mask):
    """A context that keeps PyTorch from cuDNN's kernel, its first choice on Hopper, where there is a mask.

    It gives a row that a bool mask hides the softmax over all keys, and NaN for a float32 mask of half types.
    The other fused kernels refuse such a mask, so separate steps compute it. Autocast casts the mask, too.
    """
    if mask is None or query.device.type != "cuda":
        return contextlib.nullcontext()
    kernels = _allowed_kernels()
    is_cast = torch.is_autocast_enabled("cuda")
    if SDPBackend.MATH in kernels and mask.dtype not in (torch.bool, query.dtype) and not is_cast:
        kernels = [SDPBackend.MATH]
    return sdpa_kernel(kernels)


@torch.compiler.assume_constant_result
def _allowed_kernels():
    """The kernels that sdpa_kernel allows now, without cuDNN's, unless that is the only one."""
    is_allowed = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    return [kernel for kernel, allowed in is_allowed.items() if allowed] or [SDPBackend.CUDNN_ATTENTION]


@torch.compiler.assume_constant_result  # compiled code has no counter and no warning: tracing has
def _count(what):
    calls[what] += 1
    if what != "served":
        passed_on(f"transformers: {what}", _strict)


def _without_interface(model_class):
    """Whether a model has attention layers, but none that asks transformers' AttentionInterface."""
    has_layers = False
    for each in model_class.__mro__[: model_class.__mro__.index(PreTrainedModel)]:
        names = vars(sys.modules.get(each.__module__, inspect))
        if "ALL_ATTENTION_FUNCTIONS" in names:
            return False
        has_layers |= any(
            "Attention" in name and inspect.isclass(x) and x.__module__ == each.__module__
            for name, x in names.items()
        )
    return has_layers


def _tables(model_class):
    """The dicts in a model's module that name an attention class for each implementation."""
    names = vars(sys.modules.get(model_class.__module__, inspect))
    return [x for name, x in names.items() if name.endswith("ATTENTION_CLASSES") and "eager" in x]


def _tell_of_own_layers(what, implementation):
    words = f"transformers: {what} computes attention by itself, here as with {implementation!r}"
    if implementation == "sdpa":
        words += ", whose calls minimal_attn.activate() can serve"
    passed_on(words, _strict)


def _check_model(get_correct):
    """PreTrainedModel.get_correct_attn_implementation, which chooses each model's implementation.

    For a model that has attention layers of its own, it answers another one than "minimal_attn".
    """

    @functools.wraps(get_correct)
    def checked(self, requested_attention, *args, **kwargs):
        if requested_attention == "minimal_attn":
            if _without_interface(type(self)):
                requested_attention = "sdpa" if self._supports_sdpa else "eager"
                _tell_of_own_layers(self.config.model_type, requested_attention)
                self.register_forward_pre_hook(_refuse_documents, with_kwargs=True)
            else:
                if _enter not in self._forward_pre_hooks.values():
                    self.register_forward_pre_hook(_enter, with_kwargs=True)
                    self.register_forward_hook(_leave, always_call=True)
                for table in _tables(type(self)):
                    own = "sdpa" if "sdpa" in table else "eager"
                    _tell_of_own_layers(table[own].__name__, own)
                    table["minimal_attn"] = table[own]
        return get_correct(self, requested_attention, *args, **kwargs)

    checked.of_minimal_attn = True
    return checked


def _refuse_documents(model, args, kwargs):
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(f"cu_seq_lens_q must be None: the attention of {model.config.model_type} ignores it")


def _enter(model, args, kwargs):
    if not torch.compiler.is_compiling():
        _running.documents.append(kwargs.get("cu_seq_lens_q"))


def _leave(model, args, result):
    if not torch.compiler.is_compiling():
        _running.documents.pop()


def _keep_in_batches(switch):
    """generate_batch's choice of an implementation, which refuses those that it doesn't know by name."""

    @functools.wraps(switch)
    def kept(self, model, *args, **kwargs):
        if model.config._attn_implementation != "minimal_attn":
            switch(self, model, *args, **kwargs)

    kept.of_minimal_attn = True
    return kept


def register(*, strict: bool = False) -> None:
    """Makes attn_implementation="minimal_attn" known to transformers. May be called again.

    Args:
        strict: what the kernels can't serve is an error that says why. By default it is passed on to
            transformers' functions, with one minimal_attn.FallbackWarning for each reason.

    Raises:
        TypeError: strict is no bool.
        ImportError: this version of transformers is too old, or its mask functions mean something else.
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be a bool, but was {strict!r}")
    version = f"transformers {transformers.__version__}"
    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"minimal_attn.huggingface needs transformers 5.4 or newer, but this is {version}")
    remember_factories()
    token, no_padding = torch.arange(9)[None], torch.zeros(1, dtype=torch.int64)
    functions = [causal_mask_function, bidirectional_mask_function]
    for n in (1, 3):
        functions.append(masking_utils.sliding_window_causal_mask_function(n))
        functions.append(masking_utils.sliding_window_bidirectional_mask_function(n))
        functions.append(masking_utils.chunked_causal_mask_function(n, no_padding))
    for function in functions:
        known = keys_of(function, token) or ((-1, -1), torch.zeros(1, 9, 2))  # no keys where it isn't known
        begin, end = within_window(*known, token).transpose(0, 1).unbind(-1)
        seen = (begin <= token) & (token < end)
        if not torch.equal(seen, function(0, 0, token.T, token).expand(9, 9)):
            raise ImportError(
                f"minimal_attn.huggingface doesn't know the meaning of {_name(function)} in {version}"
            )
    AttentionInterface.register("minimal_attn", attention)
    AttentionMaskInterface.register("minimal_attn", make_mask)
    get_correct = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(get_correct, "of_minimal_attn"):
        PreTrainedModel.get_correct_attn_implementation = _check_model(get_correct)
    switch = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)  # not in old versions
    if switch is not None and not hasattr(switch, "of_minimal_attn"):
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _keep_in_batches(switch)
    global _strict
    _strict = strict
