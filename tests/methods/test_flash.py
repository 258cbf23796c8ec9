"""The FLASH head alone: the rows that a state attends to, and the parts that offsets share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.heads.model import Prompts
from mmspec.methods.flash.head import FlashConfig, FlashHead
from mmspec.visual_tokens.spans import ImageSpan
from mmspec.visual_tokens.tokens import raster

WIDTH, WORDS = 16, 11
SPANS = [[ImageSpan(1, raster(2, 2)), ImageSpan(7, raster(1, 3))], []]


def head(seed: int = 0, **settings: Any) -> FlashHead:
    torch.manual_seed(seed)
    shape = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 4}
    shape |= {"num_key_value_heads": 2, "vocabulary": WORDS, "block": 3, "offset_size": 8, "bias_rank": 4}
    made = FlashHead(FlashConfig(**shape | {"compressor_options": {"tokens": 2}} | settings))
    with torch.no_grad():
        made.down.normal_()
        made.bias_out.normal_()
    return made.eval().requires_grad_(False)


def rows(seed: int = 1, length: int = 12) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_offsets_share_the_state_and_nothing_else() -> None:
    model, hidden = head(), rows()[0]
    block = model.predict(hidden, 3)
    assert block.shape == (12, 3, WIDTH)
    torch.testing.assert_close(model.predict(hidden, 1), block[:, :1])
    for offset in range(3):
        weight, bias = (part.view(3, 8, -1)[offset] for part in (model.up.weight, model.up.bias))
        inner = torch.nn.functional.silu(hidden @ weight.T + bias[:, 0])
        torch.testing.assert_close(block[:, offset], hidden + inner @ model.down[offset])


def test_a_compressed_prompt_keeps_all_text() -> None:
    model, embeddings, features = head(), rows(2), rows(3)
    questions = torch.tensor([11, 4])
    made = model.read_prompts(Prompts(embeddings, features, [12, 8], SPANS, questions))
    assert made.lengths == [12 - 7 + 2 * 2, 8]
    before = torch.cat([torch.zeros(2, 1, WIDTH), features[:, :-1]], 1)
    fused = model.fuse(embeddings, before)
    for row in range(2):
        source = made.source[row, : made.lengths[row]]
        text = source >= 0
        torch.testing.assert_close(made.rows[row, : made.lengths[row]][text], fused[row, source[text]])
    assert made.source[0].tolist() == [0, -1, -1, 5, 6, -1, -1, 10, 11]


def test_images_see_the_question_of_their_prompt() -> None:
    model = head(compressor="attention_pruning")

    def rows_of(*questions: int) -> Tensor:
        return model.read_prompts(Prompts(rows(2), rows(3), [12, 8], SPANS, torch.tensor(questions))).rows

    assert torch.equal(rows_of(11, 4), rows_of(11, 2)), "the second prompt has no image"
    assert any(not torch.equal(rows_of(11, 4), rows_of(at, 4)) for at in range(12))
