"""Checks of EAGLE heads that read images in ways of their own, for tests and planted bugs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.eagle import EagleDrafter
from mmspec.models.feature_head import Prompts
from mmspec.visual_tokens.spans import find_images
from tests.drafters.eagle_checks import Examined, Gullible, head_for
from tests.drafters.flash_checks import answer, inputs_of, target_of
from tests.drafters.naive_eagle import NaiveEagle

KINDS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "msd": {"visual": "embedded"},
    "specvlm": {"compressor": "gate"},
    "hivis": {"compressor": "none"},
    "vispec": {"visual": "embedded", "compressor": "vispec", "compressor_options": {"tokens": 2}},
}


class NaiveVisual(NaiveEagle):
    """The head on prompt and output at once: every row as `read_prompts` makes it."""

    def rows(
        self, prompt: dict[str, Any], taps: dict[int, Tensor], positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        spans = [find_images(self.target.config, prompt)]
        question = torch.tensor([prompt["input_ids"].shape[1] - 1])
        made = self.head.read_prompts(Prompts(taps[0], taps[-1], [taps[0].shape[1]], spans, question))
        places = made.slot if self.head.one_axis else positions[..., made.slot[0]]
        return made.rows, places, made.summary


def drafts_are_those_of_the_slow_way(kind: str = "vispec", family: str = "llava") -> None:
    """Ragged prompts with images and accepted paths, in float64: rows, positions, summaries are right."""
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    drafter = EagleDrafter(head_for(target, **KINDS[kind]), 6, depth=3, top_k=2).fit(target)
    examined = Examined(drafter, 8, NaiveVisual)
    cases = [inputs[case] for case in ("two images", "no image", "several turns")]
    canvas = answer(target, examined, cases, Sampler(0.9), 8, Gullible())
    assert examined.drafts >= 6, "some drafts were compared"
    assert max(canvas.stats.accepted_histogram) >= 2, "a path of several candidates was accepted"
