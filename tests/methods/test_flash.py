"""The FLASH head by itself: what a state sees, what offsets share, how it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, LlamaConfig

from mmspec.errors import InputError
from mmspec.heads.model import Prompts
from mmspec.methods.flash.head import FlashConfig, FlashHead
from mmspec.visual_tokens.boxes import raster
from mmspec.visual_tokens.spans import ImageSpan

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


def test_a_new_head_predicts_its_state_and_has_no_bias() -> None:
    torch.manual_seed(0)
    new = FlashHead(head().config)
    assert torch.equal(new.predict(rows(), 2), rows()[:, :, None].expand(-1, -1, 2, -1))
    assert not new.bias(torch.arange(WORDS)).any()
    assert head(bias_rank=0).bias(torch.arange(WORDS)).eq(0).all()


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


def test_a_head_comes_back_from_its_folder(tmp_path: Path) -> None:
    saved = head(compressor="convolution", compressor_options={"tokens": 4})
    assert torch.equal(saved.compressor.pointwise.weight, torch.eye(WIDTH)), "it begins as it chooses"
    saved.save_pretrained(tmp_path)
    parts = {key.split(".")[0] for key in load_file(tmp_path / "model.safetensors")}
    assert parts == {"fc", "decoder", "up", "down", "bias_in", "bias_out", "compressor"}
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is FlashHead and again.config.compressor == "convolution"
    places = torch.arange(12)[None]
    torch.testing.assert_close(again(rows(), places), saved(rows(), places))
    prompts = Prompts(rows(2), rows(3), [12, 8], SPANS, torch.tensor([11, 4]))
    torch.testing.assert_close(again.read_prompts(prompts).rows, saved.read_prompts(prompts).rows)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(InputError, match="summary"):
        head(compressor="vispec")
    for settings in ({"block": 0}, {"block": 17}, {"bias_rank": -1}, {"num_key_value_heads": 3}):
        named = next(iter(settings))
        with pytest.raises((ValueError, StrictDataclassClassValidationError), match=named):
            head(**settings)


def test_a_quarter_of_the_heads_holds_keys() -> None:
    for heads, groups in ((32, 8), (6, 1), (12, 3), (28, 7), (1, 1)):
        config = LlamaConfig(hidden_size=32 * heads, num_attention_heads=heads, vocab_size=50)
        made = FlashConfig.for_target(config, 50, block=7)
        assert (made.num_key_value_heads, made.block, made.hidden_size) == (groups, 7, 32 * heads)
