"""The EAGLE head alone: images that ViSpec summarises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from mmspec.heads.model import Prompts
from mmspec.methods.eagle.head import EagleConfig, EagleHead
from mmspec.visual_tokens.spans import ImageSpan
from mmspec.visual_tokens.splice import PromptRows
from mmspec.visual_tokens.tokens import raster

WIDTH, LONGEST = 16, 15
LENGTHS = [15, 8]
SPANS = [[ImageSpan(1, raster(2, 2)), ImageSpan(7, raster(1, 3)), ImageSpan(12, raster(1, 2))], []]


def head(**settings: Any) -> EagleHead:
    torch.manual_seed(0)
    target = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=24, num_attention_heads=4, num_hidden_layers=2, vocab_size=11
    )
    return EagleHead(EagleConfig.for_target(target, 11, **settings)).eval().requires_grad_(False)


def told() -> EagleHead:
    """Make a ViSpec head whose summaries have an effect."""
    made = head(visual="embedded", compressor="vispec")
    assert made.img_fc is not None
    made.img_fc.weight[:, WIDTH:].normal_()
    return made


def states(seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, LONGEST, WIDTH, generator=torch.Generator().manual_seed(seed))


def read(model: EagleHead) -> PromptRows:
    return model.read_prompts(Prompts(states(1), states(2), LENGTHS, SPANS, torch.tensor([14, 7])))


def test_text_is_told_of_its_newest_image() -> None:
    """Rows before the first image have no summary; later rows have that of the last image before them."""
    model = told()
    made, summaries = read(model), [torch.zeros(WIDTH)]
    assert model.img_fc is not None and made.summary is not None
    for span in SPANS[0]:
        images = states(1)[:1, span.start : span.stop]
        queried = model.compressor.attention(images, images, torch.ones(images.shape[:2], dtype=torch.bool))
        place = made.slot[0].tolist().index(span.stop - 1)
        torch.testing.assert_close(made.rows[0, place], queried[0, 0], msg="a token enters as it is")
        summaries.append(queried[0, 1])
    for row in range(2):
        for place, t in enumerate(made.source[row, : made.lengths[row]].tolist()):
            if t >= 0:
                newest = summaries[sum(span.start <= t for span in SPANS[row])]
                features = model.img_fc(torch.cat([states(2)[row, t - 1], newest]))
                due = model.fc(torch.cat([states(1)[row, t], features]))
                torch.testing.assert_close(made.rows[row, place], due, msg=f"token {t}")
    torch.testing.assert_close(made.summary[0], summaries[-1])
    assert not made.summary[1].any()


def test_rows_after_a_gap_see_those_before_it() -> None:
    """Positions jump after an image; transformers would treat the jump as the start of another sequence."""
    model, places = head(), torch.tensor([[1, 2, 8, 9]])
    rows = states(1)[:1, :4]
    changed = rows.clone()
    changed[:, 0] += 1
    assert not torch.isclose(model(rows, places)[:, 3], model(changed, places)[:, 3]).all()
