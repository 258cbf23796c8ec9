"""Parallel draft models (PARD): a chain from one forward pass over masks, with ragged rows and images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.methods.draft_model.drafter import DraftModelDrafter, DraftModelSession
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.trees.rejection import SpeculativeSampling
from tests.methods.eagle_checks import Gullible
from tests.methods.flash_checks import answer, inputs_of, target_of
from tests.targets import loop
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_llama

MASK, LENGTH = 127, 4
CASES = ("two images", "no image", "several turns")
SAMPLER, SEEDS = Sampler(0.9, top_p=0.95), [3, 4, 5]


def parallel(family: str, dtype: torch.dtype = torch.float32) -> VisionLanguageTarget:
    """A draft model near the target, whose config has the mask of PARD."""
    model, _ = VISION_LANGUAGE_FAMILIES[family]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.config.pard_token = MASK
    return VisionLanguageTarget(model.to(dtype))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_draft_is_what_one_forward_pass_over_masks_predicts(family: str) -> None:
    """Drafts of each row alone by transformers, whatever was accepted before."""
    target, draft = target_of(family, torch.float64), parallel(family, torch.float64)
    given, compared = [inputs_of(family, torch.float64)[case] for case in CASES], list[int]()

    class Compared(DraftModelSession):
        def propose(self, canvas: Canvas) -> Draft:
            passes = self.passes
            made = super().propose(canvas)
            assert self.passes == passes + 1
            for row, prompt in enumerate(given):
                if canvas.finish_reasons[row] is None:
                    ids = torch.tensor([[*canvas.ids[row], *[MASK] * (LENGTH - 1)]])
                    whole = {**prompt, "input_ids": ids}
                    whole.pop("attention_mask")
                    if (kinds := whole.get("mm_token_type_ids")) is not None:
                        whole["mm_token_type_ids"] = torch.zeros_like(ids)
                        whole["mm_token_type_ids"][:, : kinds.shape[1]] = kinds
                    due = draft.model(**whole).logits[0, -LENGTH:].argmax(-1)
                    assert made.tokens[row, 1:].tolist() == due.tolist()
                    compared.append(row)
            return made

    drafter = DraftModelDrafter(draft, LENGTH)
    drafter.session = Compared  # type: ignore[assignment]
    run = answer(target, drafter, given, Sampler(), 14, Gullible())
    assert len(compared) >= 6 and max(run.stats.accepted_histogram) >= 2


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_answers_are_those_of_the_target(family: str) -> None:
    target, given = target_of(family), [inputs_of(family)[case] for case in CASES]
    run = answer(target, DraftModelDrafter(parallel(family), LENGTH), given, Sampler(), 14)
    assert run.outputs() == [loop.generate(target.model, each, 14) for each in given]
    exact, draft = target_of(family, torch.float64), parallel(family, torch.float64)
    given = [inputs_of(family, torch.float64)[case] for case in CASES]
    expected = answer(exact, NoDrafter(), given, SAMPLER, 14, seed=SEEDS).outputs()
    assert (
        answer(exact, DraftModelDrafter(draft, LENGTH), given, SAMPLER, 14, seed=SEEDS).outputs() == expected
    )
    drawn: dict[str, Any] = {"new_tokens": 10, "rule": SpeculativeSampling()}
    sampled = DraftModelDrafter(draft, LENGTH, "sampled")
    together = answer(exact, sampled, given, SAMPLER, seed=SEEDS, **drawn).outputs()
    rows = zip(given, SEEDS, strict=True)
    assert together == [answer(exact, sampled, [x], SAMPLER, seed=[s], **drawn).outputs()[0] for x, s in rows]


def test_what_a_parallel_draft_model_cannot_do_is_refused() -> None:
    model = tiny_llama()
    model.config.pard_token = 64
    with pytest.raises(CheckpointError, match="must be a token from 0 to 63, or absent"):
        DraftModelDrafter(CausalTarget(model))
    model.config.pard_token = 63
    with pytest.raises(InputError, match="drafts a chain"):
        DraftModelDrafter(CausalTarget(model), tree="2x2")
