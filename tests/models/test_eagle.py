"""The EAGLE head by itself: its layer, and images fused, embedded (MSD), compressed, summed up (ViSpec)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig

from mmspec.errors import InputError, UnsupportedModelError
from mmspec.models.eagle import EagleConfig, EagleHead
from mmspec.models.feature_head import Prompts
from mmspec.visual_tokens.boxes import raster
from mmspec.visual_tokens.spans import ImageSpan
from mmspec.visual_tokens.splice import PromptRows
from tests.contracts.checks import llama
from tests.drafters.eagle_checks import head_for

WIDTH, LONGEST = 16, 15
NORM = "decoder.layers.0.input_layernorm.weight"
LENGTHS = [15, 8]
SPANS = [[ImageSpan(1, raster(2, 2)), ImageSpan(7, raster(1, 3)), ImageSpan(12, raster(1, 2))], []]
TEXT = [[0, 5, 6, 10, 11, 14], list(range(8))]
NEWEST = [[-1, 0, 0, 1, 1, 2], [-1] * 8]
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "msd": {"visual": "embedded"},
    "specvlm": {"compressor": "gate"},
    "hivis": {"compressor": "none"},
    "vispec": {"visual": "embedded", "compressor": "vispec"},
    "vispec of three": {
        "visual": "embedded",
        "compressor": "vispec",
        "compressor_options": {"tokens": 3, "heads": 2},
    },
    "pooled embeddings": {
        "visual": "embedded",
        "compressor": "pooling",
        "compressor_options": {"tokens": 1},
    },
}


def head(seed: int = 0, **settings: Any) -> EagleHead:
    torch.manual_seed(seed)
    target = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=24, num_attention_heads=4, num_hidden_layers=2, vocab_size=11
    )
    return EagleHead(EagleConfig.for_target(target, 11, **settings)).eval().requires_grad_(False)


def told(seed: int = 0, tokens: int = 1) -> EagleHead:
    """A ViSpec head whose summaries are heard."""
    made = head(seed, visual="embedded", compressor="vispec", compressor_options={"tokens": tokens})
    assert made.img_fc is not None
    made.img_fc.weight[:, WIDTH:].normal_()
    return made


def states(seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, LONGEST, WIDTH, generator=torch.Generator().manual_seed(seed))


def read(model: EagleHead, embeddings: Tensor | None = None, features: Tensor | None = None) -> PromptRows:
    return model.read_prompts(
        Prompts(
            states(1) if embeddings is None else embeddings,
            states(2) if features is None else features,
            LENGTHS,
            SPANS,
            torch.tensor([14, 7]),
        )
    )


@pytest.mark.parametrize("kind", ["eagle", "specvlm", "hivis", "vispec of three", "pooled embeddings"])
def test_all_text_stays_at_its_places(kind: str) -> None:
    """Every token but the first has its row, in order; visual rows lie in their own image's slots."""
    model = head(**KINDS[kind])
    made = read(model)
    for row, text in enumerate(TEXT):
        length = made.lengths[row]
        source, slot = made.source[row, :length].tolist(), made.slot[row, :length].tolist()
        assert [t for t in source if t >= 0] == text[1:], "no text is lost"
        assert [s for t, s in zip(source, slot, strict=True) if t >= 0] == text[1:], "text has its own place"
        for t, s in zip(source, slot, strict=True):
            assert t >= 0 or any(span.start <= s < span.stop for span in SPANS[row])
        assert slot == sorted(slot)
        assert (made.source[row, length:] == -1).all()
        own, before = states(1)[row], states(2)[row]
        for place, t in enumerate(source):
            if t >= 0:
                alone = model.fuse(own[None, t : t + 1], before[None, t - 1 : t])
                torch.testing.assert_close(made.rows[row, place], alone[0, 0], msg=f"{row}, {t}")


def test_embedded_rows_bypass_the_fusion() -> None:
    """MSD: a visual row is its embedding, whatever the fusion and the target's states are."""
    model = head(visual="embedded")
    visual = read(model).source[0] < 0
    slots = read(model).slot[0][visual]
    assert slots.tolist() == [t for span in SPANS[0] for t in range(span.start, span.stop)]
    for change in (1.0, 3.0):
        model.fc.weight.mul_(change)
        made = read(model, features=change * states(2))
        assert torch.equal(made.rows[0, visual], states(1)[0, slots])


def test_a_vispec_head_begins_as_if_it_were_told_nothing() -> None:
    model, plain = head(**KINDS["vispec"]), head(visual="embedded")
    plain.fc.load_state_dict(model.fc.state_dict())
    made, expected = read(model), read(plain)
    for row in range(2):
        text = made.source[row] >= 0, expected.source[row] >= 0
        assert torch.equal(made.rows[row][text[0]], expected.rows[row][text[1]])
    fused = model.fuse(states(1), states(2), torch.randn(2, WIDTH))
    assert torch.equal(fused, plain.fuse(states(1), states(2)))


def test_text_is_told_of_its_newest_image() -> None:
    """Each row of text by hand, for one to three images and none; later rows hear of the last one."""
    for count in (0, 1, 2, 3):
        model, spans = told(), [SPANS[0][:count], []]
        made = model.read_prompts(Prompts(states(1), states(2), LENGTHS, spans, torch.tensor([14, 7])))
        summaries = []
        for span in spans[0]:
            images = states(1)[:1, span.start : span.stop]
            mask = torch.ones(images.shape[:2], dtype=torch.bool)
            queried = model.compressor.attention(images, images, mask)
            place = made.slot[0].tolist().index(span.stop - 1)
            torch.testing.assert_close(made.rows[0, place], queried[0, 0], msg="a token enters as it is")
            summaries.append(queried[0, 1])
        for row in range(2):
            for place in range(made.lengths[row]):
                t = int(made.source[row, place])
                if t < 0:
                    continue
                begun = sum(span.start <= t for span in spans[row])
                g = summaries[begun - 1] if begun else torch.zeros(WIDTH)
                h = model.img_fc(torch.cat([states(2)[row, t - 1], g]))  # type: ignore[misc]
                due = model.fc(torch.cat([states(1)[row, t], h]))
                torch.testing.assert_close(made.rows[row, place], due, msg=f"{count} images, token {t}")
        if count:
            assert made.summary is not None
            torch.testing.assert_close(made.summary[0], summaries[-1])
            assert not made.summary[1].any()


def test_what_comes_later_is_told_of_the_last_image() -> None:
    """A row of decoding is the row that the same token would have had in the prompt."""
    model = told()
    whole = read(model)
    begun = Prompts(states(1)[:1, :14], states(2)[:1, :14], [14], SPANS[:1], torch.tensor([13]))
    start = model.read_prompts(begun)
    later = model.fuse(states(1)[:1, 14:], states(2)[:1, 13:14], start.summary)
    torch.testing.assert_close(later[0, 0], whole.rows[0, whole.lengths[0] - 1])


def test_rows_after_a_gap_see_those_before_it() -> None:
    """Positions jump where an image was; transformers would take that for the start of another sequence."""
    model, places = head(), torch.tensor([[1, 2, 8, 9]])
    rows = states(1)[:1, :4]
    changed = rows.clone()
    changed[:, 0] += 1
    assert not torch.isclose(model(rows, places)[:, 3], model(changed, places)[:, 3]).all()


def test_the_gate_hears_the_question() -> None:
    """Another question may choose another branch, for its own prompt alone; no text moves."""
    model = head(seed=3, compressor="gate")
    spans, embeddings = [SPANS[0], [ImageSpan(2, raster(2, 2))]], states(1)
    found = set()
    for seed in range(24):
        asked = states(2)
        asked[0, 13] = 4 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
        made = model.read_prompts(Prompts(embeddings, asked, LENGTHS, spans, torch.tensor([14, 7])))
        found.add(made.lengths[0])
        alone = Prompts(embeddings[1:], states(2)[1:], LENGTHS[1:], spans[1:], torch.tensor([7]))
        assert made.lengths[1] == model.read_prompts(alone).lengths[0]
        assert [t for t in made.source[0].tolist() if t >= 0] == TEXT[0][1:]
    assert len(found) > 1, "two questions chose differently"


def test_gradients_reach_the_compressor() -> None:
    for kind in ("specvlm", "vispec of three"):
        model = head(**KINDS[kind]).train().requires_grad_()
        made = read(model)
        made.rows[0, : made.lengths[0]].square().sum().backward()
        assert any(each.grad is not None and each.grad.any() for each in model.compressor.parameters()), kind


@pytest.mark.parametrize("kind", ["msd", "specvlm", "vispec"])
def test_a_head_comes_back_from_its_folder(tmp_path: Path, kind: str) -> None:
    saved = told() if kind == "vispec" else head(**KINDS[kind])
    saved.save_pretrained(tmp_path)
    parts = {key.split(".")[0] for key in load_file(tmp_path / "model.safetensors")}
    extra = {"specvlm": {"compressor"}}.get(kind, {"compressor", "img_fc"} if "vispec" in kind else set())
    assert parts == {"fc", "decoder"} | extra
    again = AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(read(again).rows, read(saved).rows)


def test_a_prompt_of_one_token_has_no_row() -> None:
    for settings in KINDS.values():
        short = Prompts(states(1)[:, :1], states(2)[:, :1], [1, 1], [[], []], torch.tensor([0, 0]))
        made = head(**settings).read_prompts(short)
        assert made.rows.shape == (2, 0, WIDTH) and made.lengths == [0, 0]


def test_readings_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="embedded") as caught:
        head(compressor="vispec")
    assert caught.value.argument == "visual", "summaries are of embeddings"
    with pytest.raises((ValueError, StrictDataclassClassValidationError), match="visual"):
        head(visual="decoupled")


def test_a_published_layer_has_no_norm_in_front(tmp_path: Path) -> None:
    ours, theirs = head_for(llama()), head_for(llama(), input_norm=False)
    assert set(ours.state_dict()) - set(theirs.state_dict()) == {NORM}
    theirs.load_state_dict({name: each for name, each in ours.state_dict().items() if name != NORM})
    rows, places = torch.randn(1, 5, 32), torch.arange(5)[None]
    assert not torch.allclose(ours(rows, places), theirs(rows, places))
    ours.decoder.layers[0].input_layernorm = nn.Identity()
    assert torch.equal(ours(rows, places), theirs(rows, places))
    theirs.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again(rows, places), theirs(rows, places))


def test_layers_without_a_norm_in_front_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EagleConfig.for_target(llama().config, 64, input_norm=False)
    decoder = AutoModel.from_config(config.layer_config())
    del decoder.layers[0].input_layernorm
    monkeypatch.setattr(AutoModel, "from_config", lambda _: decoder)
    with pytest.raises(UnsupportedModelError, match="LlamaModel have no norm"):
        EagleHead(config)
