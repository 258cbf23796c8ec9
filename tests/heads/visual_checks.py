"""EAGLE heads with special processing of images, and slow drafting with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.heads.model import Prompts
from mmspec.visual_tokens.spans import find_images
from tests.methods.naive_eagle import NaiveEagle

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
