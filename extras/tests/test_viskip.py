"""Drafts that rest at images: the attention of an eager model, exact outputs, and rows that come and go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from extras.tests.running import outputs_alone, outputs_of
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.errors import InputError
from mmspec.methods.draft_model.drafter import visual_places
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec_extras.methods.viskip.drafter import VisualSkipSession
from tests.targets import loop
from tests.tiny_models import encode, tiny_images, tiny_llava, tiny_qwen3_5, user_message

LAYER, THRESHOLD = 1, 0.4
IMAGES = (tiny_images()[:1], tiny_images()[1:3], [])


@pytest.fixture(scope="module")
def inputs() -> list[dict[str, Any]]:
    processor = tiny_llava()[1]
    return [dict(encode(processor, user_message("what is there ?", each))) for each in IMAGES]


@torch.inference_mode()
def eager_mass(model: Any, inputs: dict[str, Any], tokens: list[int]) -> float:
    """Attention of the last token but one to images, by a forward pass without a cache."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens[:-1]], dtype=torch.long)], 1)
    whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    paid = model(**whole, use_cache=False, output_attentions=True).attentions[LAYER]
    return float(paid[0, :, -1].mean(0)[visual_places(model.config, inputs)].sum())


def test_drafts_rest_where_an_eager_model_attends_to_images(
    inputs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llava()[0]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    masses: list[list[float]] = []
    look = VisualSkipSession._look

    def looked(self: VisualSkipSession, hidden: torch.Tensor) -> None:
        look(self, hidden)
        masses.append(self.mass.tolist())

    monkeypatch.setattr(VisualSkipSession, "_look", looked)
    options = {"num_draft_tokens": 3, "threshold": THRESHOLD, "layer": LAYER}
    chosen = build_accelerator("viskip", tiny_llava()[0], **options).fit(VisionLanguageTarget(model))
    run = loop.GreedyRun(VisionLanguageTarget(model), chosen, inputs, Stopping(20))
    before: list[list[int]] = []
    rested = drafted = 0
    for step, round in enumerate(run):
        for row, tokens in enumerate(before):
            if step and len(tokens) < 20:
                expected = eager_mass(eager, inputs[row], tokens)
                assert masses[step - 1][row] == pytest.approx(expected, abs=1e-4)
                is_drafted = bool(round.draft.valid[row, 1:].any())
                assert is_drafted == (expected < THRESHOLD)
                rested, drafted = rested + (not is_drafted), drafted + is_drafted
        before = [list(row) for row in run.outputs]
    assert run.outputs == [loop.generate(model, each, 20) for each in inputs]
    assert min(rested, drafted) > 3


def test_rows_come_and_go_and_sample_what_they_sample_alone() -> None:
    pipe: Any = VisionLanguagePipeline(*tiny_llava())
    pipe.set_accelerator("viskip", drafter=tiny_llava()[0], num_draft_tokens=3, threshold=THRESHOLD)
    plain: Any = VisionLanguagePipeline(*tiny_llava(), accelerator="none")
    assert [found.tokens for found in outputs_of(pipe)] == [each.tokens for each in outputs_alone(plain)]


def test_what_cannot_be_read_is_refused() -> None:
    draft = CausalTarget(tiny_llava()[0])
    with pytest.raises(InputError, match="threshold"):
        build_accelerator("viskip", draft, threshold=1.5)
    with pytest.raises(InputError, match="layer"):
        build_accelerator("viskip", draft, layer=9).fit(VisionLanguageTarget(tiny_llava()[0]))
    hybrid = CausalTarget(tiny_qwen3_5())
    linear = hybrid.config.get_text_config(decoder=True).layer_types.index("linear_attention")
    with pytest.raises(InputError, match="layer"):
        build_accelerator("viskip", draft, layer=linear).fit(hybrid)
