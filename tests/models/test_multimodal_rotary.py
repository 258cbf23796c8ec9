"""Rotary positions of three axes against those of transformers."""

import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mmspec.models.head_layers import MultimodalRotary

PLACES = torch.stack([torch.full((2, 7), 5), torch.arange(14).view(2, 7), 20 - torch.arange(14).view(2, 7)])


@pytest.mark.parametrize("section", [[24, 20, 20], [1, 1, 2]])
def test_interleaved_axes_are_those_of_qwen3_vl(section: list[int]) -> None:
    width = 2 * sum(section)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, "mrope_interleaved": True}
    theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=width, rope_parameters=rope))
    ours, x = MultimodalRotary(width, 1e4, section, interleaved=True), torch.zeros(1)
    for places in (PLACES, PLACES[0]):
        expected = theirs(x, places if places.dim() == 3 else places.expand(3, -1, -1))
        for one, other in zip(ours(x, places), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("section", [[16, 24, 24], [1, 1, 2]])
def test_axes_that_follow_one_another_are_those_of_the_sections(section: list[int]) -> None:
    width = 2 * sum(section)
    cosines, sines = MultimodalRotary(width, 1e4, section, interleaved=False)(torch.zeros(1), PLACES)
    frequency = 1e4 ** (-torch.arange(0, width, 2) / width)
    axes = [axis for axis, count in enumerate(section) for _ in range(count)]
    angles = torch.stack([PLACES[axis] * f for axis, f in zip(axes, frequency, strict=True)], -1)
    torch.testing.assert_close(cosines, torch.cat([angles, angles], -1).cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sines, torch.cat([angles, angles], -1).sin(), atol=1e-5, rtol=0)
