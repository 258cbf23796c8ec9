"""Converted weights give the logits of an independent forward, in one piece, in chunks, in trees, padded."""

import pytest
import torch
from transformers import DynamicCache

from mmspec.errors import InputError
from mmspec.models.llamagen import (
    LlamaGenConfig,
    LlamaGenForCausalLM,
    caption_prompt,
    class_prompt,
    null_caption_prompt,
)
from mmspec.models.llamagen.modeling import raster_rotation
from mmspec.transformers_versions import CACHE
from tests.models.converted import convert_and_load
from tests.models.naive_llamagen import caption_prefix, class_prefix, naive_logits
from tests.models.official_layout import CAPTIONS, CLASSES, GRID, HEADS, VOCABULARY, transformer_state

TOKENS = torch.randint(VOCABULARY, (GRID**2,), generator=torch.Generator().manual_seed(1))
FEATURES = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(2))
# logits of size 3 to 10 in float32 against float64
CLOSE = dict(rtol=1e-5, atol=3e-5)


def with_tokens(prompt: dict, tokens: torch.Tensor) -> dict:
    """A prompt and the same image tokens in every row."""
    ids = prompt["input_ids"]
    return {**prompt, "input_ids": torch.cat([ids, tokens.expand(len(ids), -1)], dim=1)}


@pytest.fixture(scope="module")
def class_state():
    return transformer_state(**CLASSES)


@pytest.fixture(scope="module")
def class_model(class_state, tmp_path_factory):
    return convert_and_load(tmp_path_factory.mktemp("c2i"), {"model": class_state})


@pytest.fixture(scope="module")
def caption_state():
    return transformer_state(**CAPTIONS)


@pytest.fixture(scope="module")
def caption_model(caption_state, tmp_path_factory):
    return convert_and_load(tmp_path_factory.mktemp("t2i"), {"module": caption_state})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_class_conditional_logits(class_model, class_state, attention):
    class_model.set_attn_implementation(attention)
    prompt = class_prompt(class_model.config, [3, None])
    logits = class_model(**with_tokens(prompt, TOKENS)).logits
    for row, label in enumerate((3, 5)):
        prefix = class_prefix(class_state, label)
        expected = naive_logits(class_state, HEADS, GRID, prefix, TOKENS.tolist())
        torch.testing.assert_close(logits[row].double(), expected, **CLOSE)
    class_model.set_attn_implementation("sdpa")


@torch.inference_mode()
def test_grouped_queries_and_a_head_of_another_width(tmp_path):
    state = transformer_state(heads=4, kv_heads=2, width=48, **CLASSES)
    model = convert_and_load(tmp_path, state, heads=4)
    assert model.config.num_key_value_heads == 2
    logits = model(**with_tokens(class_prompt(model.config, [0]), TOKENS)).logits
    expected = naive_logits(state, 4, GRID, class_prefix(state, 0), TOKENS.tolist())
    torch.testing.assert_close(logits[0].double(), expected, **CLOSE)


@torch.inference_mode()
def test_padded_captions_are_read_by_a_mask_on_the_left(caption_model, caption_state):
    prompt = with_tokens(caption_prompt(caption_model.config, FEATURES), TOKENS)
    padded = [4, 0]
    mask = torch.ones_like(prompt["input_ids"])
    mask[0, :4] = 0
    logits = caption_model(**prompt, attention_mask=mask).logits
    for row in range(2):
        prefix = caption_prefix(caption_state, FEATURES[row])
        expected = naive_logits(caption_state, HEADS, GRID, prefix, TOKENS.tolist(), padded[row])
        torch.testing.assert_close(logits[row, padded[row] :].double(), expected[padded[row] :], **CLOSE)


@torch.inference_mode()
def test_a_caption_without_its_padding_is_the_same_with_positions_counted_from_the_image(
    caption_model, caption_state
):
    prompt = with_tokens(caption_prompt(caption_model.config, FEATURES[:1, 4:]), TOKENS)
    logits = caption_model(**prompt, position_ids=4 + torch.arange(2 + GRID**2)[None]).logits
    prefix = caption_prefix(caption_state, FEATURES[0])
    expected = naive_logits(caption_state, HEADS, GRID, prefix, TOKENS.tolist(), padded=4)
    torch.testing.assert_close(logits[0].double(), expected[4:], **CLOSE)


@torch.inference_mode()
def test_the_null_caption_is_the_learned_buffer_cut_to_the_prompt(caption_model, caption_state):
    prompt = with_tokens(null_caption_prompt(caption_model, 2), TOKENS)
    logits = caption_model(**prompt, position_ids=4 + torch.arange(2 + GRID**2)[None]).logits
    prefix = caption_prefix(caption_state, caption_state["cls_embedding.uncond_embedding"])
    expected = naive_logits(caption_state, HEADS, GRID, prefix, TOKENS.tolist(), padded=4)
    torch.testing.assert_close(logits[0].double(), expected[4:], **CLOSE)


@torch.inference_mode()
def test_chunks_through_a_cache_equal_the_full_forward(class_model):
    prompt = with_tokens(class_prompt(class_model.config, [1, 2]), TOKENS)
    full = class_model(**prompt).logits
    cache, pieces = DynamicCache(config=class_model.config), []
    for ids in prompt["input_ids"].split([1, 7, 1, 8], dim=1):
        pieces.append(class_model(input_ids=ids, **{CACHE: cache}, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, **CLOSE)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_every_path_of_a_masked_tree_equals_its_own_full_forward_and_can_be_rolled_back(
    class_model, attention
):
    class_model.set_attn_implementation(attention)
    committed = with_tokens(class_prompt(class_model.config, [4]), TOKENS[:6])["input_ids"]
    paths = [[7], [7, 8], [7, 9], [7, 9, 10], [11]]  # nodes of a tree, each by its tokens from the root
    parents = [[path[: length + 1] for length in range(len(path))] for path in paths]
    visible = torch.ones(1, 1, len(paths), committed.shape[1] + len(paths), dtype=torch.bool)
    visible[..., committed.shape[1] :] = torch.tensor([[node in seen for node in paths] for seen in parents])
    mask = visible
    if attention == "eager":
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    depths = torch.tensor([[len(path) - 1 for path in paths]])
    cache = DynamicCache(config=class_model.config)
    class_model(input_ids=committed, **{CACHE: cache}, use_cache=True)
    for _ in range(2):
        logits = class_model(
            input_ids=torch.tensor([[path[-1] for path in paths]]),
            attention_mask=mask,
            position_ids=committed.shape[1] + depths,
            **{CACHE: cache},
            use_cache=True,
        ).logits
        for node, path in enumerate(paths):
            alone = class_model(torch.cat([committed, torch.tensor([path])], dim=1)).logits[0, -1]
            torch.testing.assert_close(logits[0, node], alone, **CLOSE)
        cache.crop(-len(paths))
    class_model.set_attn_implementation("sdpa")


@torch.inference_mode()
def test_only_the_logits_that_are_asked_for(class_model):
    prompt = with_tokens(class_prompt(class_model.config, [0]), TOKENS)
    full = class_model(**prompt).logits
    torch.testing.assert_close(class_model(**prompt, logits_to_keep=1).logits, full[:, -1:])
    kept = torch.tensor([0, 5])
    torch.testing.assert_close(class_model(**prompt, logits_to_keep=kept).logits, full[:, kept])


def test_it_learns(class_model):
    prompt = with_tokens(class_prompt(class_model.config, [0]), TOKENS)
    targets = prompt["input_ids"].where(prompt["input_ids"] < VOCABULARY, -100)
    loss = class_model(**prompt, labels=targets).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in class_model.parameters())
    class_model.zero_grad()


def test_labels_that_do_not_exist_are_refused(class_model):
    for labels, named in (([0, 5], r"class_labels\[1\]"), ([-1], "0 to 4"), ([True], "0 to")):
        with pytest.raises(InputError, match=named):
            class_prompt(class_model.config, labels)


def test_prompts_of_the_other_condition_are_refused(class_model, caption_model):
    with pytest.raises(InputError, match="conditioned on captions"):
        class_prompt(caption_model.config, [0])
    with pytest.raises(InputError, match="conditioned on classes"):
        caption_prompt(class_model.config, FEATURES)
    with pytest.raises(InputError, match="conditioned on classes"):
        class_model(input_ids=TOKENS[None], caption_features=FEATURES)
    with pytest.raises(InputError, match="conditioned on captions"):
        null_caption_prompt(class_model)


def test_features_that_do_not_fit_are_refused(caption_model):
    for shape in ((1, 7, 12), (1, 6, 11), (6, 12), (1, 0, 12)):
        with pytest.raises(InputError, match="caption_features"):
            caption_prompt(caption_model.config, torch.zeros(shape))


def test_configs_that_cannot_be_built_are_refused():
    for settings, named in (
        ({"condition_type": "sketch"}, "'class' or 'caption'"),
        ({"num_attention_heads": 7}, "multiple of the 7 heads"),
        ({"num_key_value_heads": 5}, "divisor of"),
        ({"hidden_size": 72, "num_attention_heads": 12}, "multiple of 4"),
    ):
        with pytest.raises(Exception, match=named):
            LlamaGenConfig(**settings)


@pytest.mark.parametrize("condition", ["class", "caption"])
def test_condition_slots_and_places_beyond_the_image_have_neither_cosine_nor_sine(condition):
    config = LlamaGenConfig.from_size("B", condition_type=condition)
    positions = torch.arange(config.max_position_embeddings + 3)[None]
    cos, sin = (part[0] for part in raster_rotation(positions, config))
    for outside in (slice(0, config.prefix_length), slice(config.max_position_embeddings, None)):
        assert not cos[outside].any() and not sin[outside].any()
    assert (cos[config.prefix_length] == 1).all() and not sin[config.prefix_length].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_keys_of_condition_slots_are_exactly_zero(dtype):
    config = LlamaGenConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=16)
    model = LlamaGenForCausalLM(config).eval().to(dtype)
    output = model(**class_prompt(config, [3]), use_cache=True)
    for layer in getattr(output, CACHE).layers:
        assert layer.keys.dtype == dtype
        assert not layer.keys.any() and layer.values.any()
