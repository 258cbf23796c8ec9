"""Prompts of images that a target draws itself, for drafters that learn from what they draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mmspec.errors import InputError
from mmspec.training.data.llamagen_images import STAGE, TRIAL_IMAGES
from mmspec.training.data.sequences import DrafterBatch, Trial

__all__ = ["PromptedImages"]


class PromptedImages:
    """Data of prompts alone. The last two are held out.

    Args:
        rows: prompts, as `ask` takes them.
        ask: makes requests of some of them, and says how they are sampled.
        batch_size: images a step and process.
        seed: of what is drawn for each step.

    Raises:
        InputError: too few prompts.
    """

    def __init__(
        self, rows: Sequence[Any], ask: Callable[[Sequence[Any]], Trial], batch_size: int, seed: int
    ) -> None:
        if len(rows) <= TRIAL_IMAGES:
            raise InputError("data", f"{len(rows)} rows", f"more than {TRIAL_IMAGES}, which are held out")
        self.rows, self.held_out = rows[:-TRIAL_IMAGES], rows[-TRIAL_IMAGES:]
        self.ask, self.batch_size, self.seed = ask, batch_size, seed

    def prompts(self, step: int, process: int) -> Trial:
        """Prompts of a step."""
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        return self.ask([self.rows[row] for row in rng.integers(len(self.rows), size=self.batch_size)])

    def trial(self) -> Trial:
        """Held-out prompts."""
        return self.ask(self.held_out)

    def batch(self, step: int, process: int) -> DrafterBatch:
        """Refuse: there are no images to read.

        Raises:
            InputError: always.
        """
        raise InputError("data", "prompts", "images with prompts: the method learns from images")
