"""minimal_attn.huggingface with packed batches: each document gets what it gets alone, in float64."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.4")

from test_huggingface import DECODERS, SERVED, SIZES, decoder, masks, ragged  # noqa: E402
from test_huggingface_masks import mask_arguments, seen_by  # noqa: E402

import minimal_attn.huggingface as huggingface  # noqa: E402
from minimal_attn.huggingface import make_mask, register  # noqa: E402

MODELS = ["llama", "mistral", "gpt_oss", "gpt2", "opt", "granitemoehybrid", "gemma2", "llama4_text"]
LENGTHS = [7, 4, 9]
# Else chunks of packed documents are those of the whole row.
REMAPS = hasattr(masks, "remap_positions_for_packed_sequence")
NO_DROPOUT = dict(dropout=0.0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
NO_DROPOUT |= dict(activation_function="gelu")  # OPT's ReLU has a kink, where rounding decides a gradient


def collated(lengths=LENGTHS):
    """(documents, the batch that transformers' collator packs them in)."""
    documents = [torch.randint(3, 99, (n,)) for n in lengths]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": x.tolist()} for x in documents])
    return documents, {name: x for name, x in batch.items() if name != "labels"}


def alone(model, documents):
    """Logits of each document alone, in float64, and the gradients of their squares' sum."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    o = torch.cat([model(input_ids=x[None], use_cache=False).logits[0] for x in documents])
    o.square().sum().backward()
    return o.detach(), {
        name: x.grad
        for name, x in model.named_parameters()
        if "k_proj.weight" in name or "c_attn.weight" in name
    }


def check_packed(name, seed, why=SERVED, lengths=LENGTHS, reshape=lambda x: x, **options):
    register()
    model = decoder(name, seed, **NO_DROPOUT, **options).train()
    documents, batch = collated(lengths)
    expected, expected_grads = alone(model, documents)
    model.set_attn_implementation("minimal_attn")
    huggingface.calls.clear()
    for n in ("input_ids", "position_ids"):
        batch[n] = reshape(batch[n])
    o = model(**batch).logits.flatten(0, 1)
    o.square().sum().backward()
    assert set(huggingface.calls) == why
    assert (o.double() - expected).norm() < 1e-5 * expected.norm()
    for n, x in model.named_parameters():
        if n in expected_grads:
            assert (x.grad.double() - expected_grads[n]).norm() < 1e-4 * expected_grads[n].norm()
    with torch.no_grad():  # with a cache, so that transformers' masks ignore position_ids
        o = model.eval()(**batch).logits.flatten(0, 1)
    assert (o.double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_cu_seq_lens_decide(name, seed):
    check_packed(name, seed, SERVED)


def test_several_rows_of_documents(seed):
    """Documents end within a row or with it; tokens count on from row to row."""
    for name in ("mistral", "llama4_text"):
        check_packed(name, seed, lengths=[3, 5, 8], reshape=lambda x: x.view(2, 8))


def test_documents_in_transformers_functions(seed):
    """Where the kernels can't serve: head dimensions above 512."""
    for name in ("llama", "llama4_text"):
        check_packed(name, seed, {"head dimension"}, head_dim=520)


def test_packed_positions(seed):
    """position_ids alone: without a cache transformers' mask has the documents, and the kernels take them."""
    register()
    for name in ("llama", "mistral", *["llama4_text"] * REMAPS):
        model = decoder(name, seed)
        documents, batch = collated()
        expected, _ = alone(model, documents)
        model.set_attn_implementation("minimal_attn")
        huggingface.calls.clear()
        with torch.no_grad():
            o = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        assert (o.double() - expected).norm() < 1e-5 * expected.norm()
        assert set(huggingface.calls) == SERVED


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", *["opt"] * REMAPS])
def test_packed_positions_with_a_cache(name, seed):
    """Or in models whose mask ignores position_ids: documents are apart, as in transformers' flash route."""
    register()
    model = decoder(name, seed, **NO_DROPOUT)
    documents, batch = collated()
    expected, _ = alone(model, documents)
    model.set_attn_implementation("minimal_attn")
    huggingface.calls.clear()
    o = model(batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
    assert (o.double() - expected).norm() < 1e-5 * expected.norm()
    assert set(huggingface.calls) == SERVED


def test_blocks_in_packed_positions():
    """An image's tokens are counted in the row, and not in their document."""
    register()
    ids = torch.tensor([[-1, -1, -1, -1, 0, 0, -1]])
    function = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(ids))
    arguments = mask_arguments(mask_function=function, batch_size=1)
    mask = make_mask(**arguments).by_positions(torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    seen = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool().tril()
    seen[4, 5] = True
    assert torch.equal(seen_by(mask)[0, 0], seen)
    assert torch.equal(mask.full_tensor()[0, 0], seen)


def test_cu_seq_lens_overrule_positions(seed):
    register()
    model = decoder("llama", seed)
    _, batch = collated()
    fewer = torch.tensor([0, 11, 20], dtype=torch.int32)
    batch |= dict(cu_seq_lens_q=fewer, cu_seq_lens_k=fewer, max_length_q=11, max_length_k=11)
    seen = torch.block_diag(torch.ones(11, 11), torch.ones(9, 9)).tril().bool()[None, None]
    call = dict(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(**call, attention_mask=seen).logits
        model.set_attn_implementation("minimal_attn")
        torch.testing.assert_close(model(**batch, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def test_contradictions_are_refused(seed):
    register()
    model = decoder("llama", seed)
    model.set_attn_implementation("minimal_attn")
    _, batch = collated()
    ids, mask = ragged(2, 10)
    cu = torch.tensor([0, 7, 11, 20])
    with torch.no_grad():
        with pytest.raises(ValueError, match="cu_seq_lens_k and attention_mask must agree"):
            model(ids, attention_mask=mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
        with pytest.raises(ValueError, match="must be given together, but cu_seq_lens_k is None"):
            model(ids, cu_seq_lens_q=cu)
        for wrong, was in (cu.tolist(), "list"), (cu.float(), "torch.float32"):
            with pytest.raises(TypeError, match=f"^cu_seq_lens_q must be .* integer dtype, but was {was}$"):
                model(ids, cu_seq_lens_q=wrong, cu_seq_lens_k=wrong)
        for wrong in (cu + 1, cu.flip(0)):
            with pytest.raises(
                ValueError, match="cu_seq_lens_q must rise from 0 to 20, the number of queries"
            ):
                model(ids, cu_seq_lens_q=wrong, cu_seq_lens_k=wrong)
    longer = make_mask(**mask_arguments(kv_length=9, q_offset=2))  # two keys of a cache
    with pytest.raises(ValueError, match="cu_seq_lens_k must rise from 0 to 27, the number of keys"):
        longer.packed(torch.tensor([0, 21]), torch.tensor([0, 21]))


def test_choices_of_keys_ignore_documents(seed):
    """deepseek_v32 chooses each query's keys among those of all documents, before attention is called."""
    layer = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    cu = torch.tensor([0, 4, 9])
    chosen = dict(indices=torch.zeros(1, 9, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="cu_seq_lens_q must be None in Module"):
        huggingface.attention(layer, q, k, v, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu, **chosen)


@pytest.mark.parametrize("name", ["stablelm", "nemotron", "bloom"])
def test_models_that_ignore_cu_seq_lens(name, seed):
    """Refused, since documents would see each other; position_ids do where transformers' mask has them."""
    register()
    options = {**SIZES, **NO_DROPOUT, **DECODERS.get(name, ({},))[0]}
    config = transformers.AutoConfig.for_model(name, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="minimal_attn")
    documents, batch = collated()
    for _ in range(2):
        with pytest.raises(ValueError, match="cu_seq_lens_q must be None"):
            model(**batch)
    assert not huggingface._running.documents
    if name != "bloom":
        expected, _ = alone(model, documents)
        o = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        assert (o.double() - expected).norm() < 1e-5 * expected.norm()


def test_other_threads_have_no_documents(seed):
    register()
    model, other = (decoder("mistral", seed, **NO_DROPOUT).eval() for _ in range(2))
    for each in model, other:
        each.set_attn_implementation("minimal_attn")
    _, batch = collated()
    with ThreadPoolExecutor(1) as thread:

        def meanwhile(*_):
            thread.submit(other, batch["input_ids"]).result()

        model.model.layers[0].register_forward_pre_hook(meanwhile)
        model(**batch)


def test_documents_of_padding(seed):
    """Padding that is a document of its own, or in none, contradicts nothing."""
    mask = make_mask(**mask_arguments(batch_size=1, attention_mask=torch.arange(7)[None] < 5))
    for cu in (torch.tensor([0, 2, 5, 7]), torch.tensor([0, 2, 5])):
        packed = mask.packed(cu, cu)
        assert packed.why is None and packed.documents.max_length_k == 3
        assert mask.packed(cu, cu) is packed  # made once for all layers
    with pytest.raises(ValueError, match="must agree"):
        cu = torch.tensor([0, 2, 7])
        mask.packed(cu, cu)


@pytest.mark.parametrize("remapped", [False, True])
def test_masks_of_documents(remapped, seed):
    """The tensor that transformers' functions get, by the contract's words."""
    register()
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
    i, j = torch.arange(7)[:, None], torch.arange(7)
    seen = (numbers[:, :, None] == numbers[:, None]) & (j <= i) & (j > i - 3)
    function = masks.sliding_window_causal_mask_function(3)
    if remapped and not hasattr(masks, "remap_positions_for_packed_sequence"):
        pytest.skip("not in this transformers")
    if remapped:
        positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]])
        function = masks.remap_positions_for_packed_sequence(function, positions)
    by_numbers = masks.and_masks(function, masks.packed_sequence_mask_function(numbers))
    arguments = dict(batch_size=2, mask_function=by_numbers, allow_is_causal_skip=False)
    mask = make_mask(**mask_arguments(**arguments))
    assert torch.equal(seen_by(mask)[:, 0], seen)
    assert torch.equal(mask.tensor()[:, 0], seen)
    cu = torch.tensor([0, 3, 5, 7, 8, 14])
    arguments["mask_function"] = masks.sliding_window_causal_mask_function(3)
    again = make_mask(**mask_arguments(**arguments))
    assert torch.equal(again.packed(cu, cu).tensor()[:, 0], seen)
    assert torch.equal(mask.packed(cu, cu).to("cpu").tensor()[:, 0], seen)


def test_a_mask_that_is_a_tensor(seed):
    """Documents hide keys of a bool mask and of one to add."""
    layer = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    cu = torch.tensor([0, 4, 9])
    bias = torch.randn(1, 1, 9, 9)
    seen = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool()
    for mask, both in ((bias > 0, (bias > 0) & seen), (bias, bias.masked_fill(~seen, -torch.inf))):
        o, _ = huggingface.attention(layer, q, k, v, mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, both)
        torch.testing.assert_close(o.transpose(1, 2), expected)


def test_documents_without_a_mask(seed):
    """A vision encoder's images: no mask and not causal."""
    layer = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    cu = torch.tensor([0, 4, 9])
    for causal in (False, True):
        seen = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool()
        seen = seen.tril() if causal else seen
        huggingface.calls.clear()
        o, _ = huggingface.attention(
            layer, q, k, v, None, is_causal=causal, cu_seq_lens_q=cu, cu_seq_lens_k=cu
        )
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
        torch.testing.assert_close(o.transpose(1, 2), expected)
        assert set(huggingface.calls) == SERVED
    with pytest.raises(ValueError, match="packed sequences need a mask"):
        huggingface.attention(layer, q, k, v, None, sliding_window=3, cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_compiled_documents(seed):
    torch._dynamo.reset()
    register()
    model = decoder("llama", seed)
    documents, batch = collated()
    expected, _ = alone(model, documents)
    model.set_attn_implementation("minimal_attn")
    huggingface.calls.clear()
    with torch.no_grad():
        o = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch).logits[0]
    assert (o.double() - expected).norm() < 1e-5 * expected.norm()
    assert set(huggingface.calls) == SERVED
