"""Positions of a raster: condition slots have none, rows and columns turn half of the pairs each."""

import math

import pytest
import torch

from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForCausalLM, class_prompt
from mmspec.models.llamagen.modeling import raster_rotation, rotate_pairs
from mmspec.transformers_versions import CACHE

CONFIG = LlamaGenConfig.from_size("B", grid_size=16)  # one slot, 32 pairs


def table(config: LlamaGenConfig, beyond: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = raster_rotation(torch.arange(config.max_position_embeddings + beyond)[None], config)
    return cos[0], sin[0]


@pytest.mark.parametrize("condition", ["class", "caption"])
def test_condition_slots_and_places_beyond_the_image_have_neither_cosine_nor_sine(condition):
    config = LlamaGenConfig.from_size("B", condition_type=condition)
    cos, sin = table(config)
    for outside in (slice(0, config.prefix_length), slice(config.max_position_embeddings, None)):
        assert not cos[outside].any() and not sin[outside].any()
    assert (cos[config.prefix_length] == 1).all() and not sin[config.prefix_length].any()


def test_the_second_cell_turns_the_first_column_pair_by_one():
    cos, sin = table(CONFIG)
    assert not sin[2, :16].any()
    assert sin[2, 16] == pytest.approx(math.sin(1), abs=1e-12)
    assert cos[2, 17] == pytest.approx(math.cos(10000 ** (-2 / 32)), abs=1e-12)


def test_the_second_row_turns_the_row_pairs_alone():
    _, sin = table(CONFIG)
    assert sin[1 + 16, 0] == pytest.approx(math.sin(1), abs=1e-12)
    assert not sin[1 + 16, 16:].any()


def test_adjacent_dimensions_are_a_pair():
    states = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    states[..., 2] = 1.0
    angle = torch.tensor([[[0.0, 0.5, 0.0, 0.0]]], dtype=torch.float64)
    turned = rotate_pairs(states, angle.cos(), angle.sin())[0, 0, 0]
    assert turned.tolist() == pytest.approx([0, 0, math.cos(0.5), math.sin(0.5), 0, 0, 0, 0])


def test_the_3b_has_25_pairs_for_each_direction():
    cos, _ = table(LlamaGenConfig.from_size("3B"))
    assert cos.shape[1] == 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_keys_of_condition_slots_are_exactly_zero(dtype):
    config = LlamaGenConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=16)
    model = LlamaGenForCausalLM(config).eval().to(dtype)
    output = model(**class_prompt(config, [3]), use_cache=True)
    for layer in getattr(output, CACHE).layers:
        assert layer.keys.dtype == dtype
        assert not layer.keys.any() and layer.values.any()
