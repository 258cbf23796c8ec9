"""Conversations of a list as data for drafters: drawn anew in each step, never cut.

Those that are too long are skipped, and those whose images cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError, MediaError
from mmspec.training.data.conversations import Conversation, ConversationReader
from mmspec.training.data.rows import DamagedFiles
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, Trial

__all__ = ["ConversationRows"]

logger = logging.getLogger(__name__)

STAGE = 12
TRIAL_ROWS, TRIAL_TOKENS = 4, 96
ATTEMPTS = 100  # rows that are drawn in place of those that are skipped, before a step is given up


class ConversationRows:
    """Data of given conversations, of which the last four are held out: of those whose images can be read.

    Args:
        reader: of the target's tokens.
        rows: with replies.
        batch_size: sequences a step and process.
        seed: of what is drawn for each step.
        max_length: longer sequences, in tokens, are skipped with a warning; None takes what the target can.
        regenerate: longest reply that the target writes itself, in place of the row's; 0 keeps the rows'.

    Attributes:
        skipped: rows that are too long, by index, of those that were drawn so far.
        damaged: rows whose images cannot be read, of those that were drawn so far.

    Raises:
        InputError: there are too few.
        MediaError: too many have images that cannot be read; see `DamagedFiles`.
    """

    def __init__(
        self,
        reader: ConversationReader,
        rows: Sequence[Conversation],
        batch_size: int,
        seed: int,
        *,
        max_length: int | None = None,
        regenerate: int = 0,
    ) -> None:
        self.reader, self.batch_size, self.seed, self.regenerate = reader, batch_size, seed, regenerate
        text = reader.target.config.get_text_config(decoder=True)
        self.max_length = max_length or getattr(text, "max_position_embeddings", None)
        if len(rows) <= TRIAL_ROWS:
            raise InputError("data", f"{len(rows)} rows", f"more than {TRIAL_ROWS}, which are held out")
        self.skipped: set[int] = set()
        self.damaged = DamagedFiles(len(rows))
        self.told: dict[int, Conversation] = {}
        left, held_out = list(rows), list[Conversation]()
        while left and len(held_out) < TRIAL_ROWS:
            row = left.pop()
            held_out += [row] if self.opened(row) is not None else []
        if not left:
            raise InputError("data", f"{len(rows)} rows", f"more than {TRIAL_ROWS} with images to read")
        self.rows, self.held_out = left, held_out[::-1]

    @property
    def left_out(self) -> dict[str, Any]:
        """Rows that were drawn and skipped, for the record of the training."""
        found = {"too_long": len(self.skipped), "damaged": sorted(self.damaged.found.values())}
        return {name: value for name, value in found.items() if value}

    def batch(self, step: int, process: int) -> DrafterBatch:
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        drawn = [int(index) for index in rng.integers(len(self.rows), size=self.batch_size + ATTEMPTS)]
        if self.regenerate:
            self.tell(drawn[: self.batch_size])
        fitting = (example for index in drawn if (example := self.example(index)) is not None)
        examples = tuple(islice(fitting, self.batch_size))
        if len(examples) < self.batch_size:
            allowed = f"rows of at most {self.max_length} tokens; {len(self.skipped)} are longer so far"
            if self.damaged.found:
                allowed += f", and {len(self.damaged.found)} have images that cannot be read"
            raise InputError("max_length", self.max_length, allowed)
        return DrafterBatch(examples, int(rng.integers(2**62)))

    def trial(self) -> Trial:
        told = [each.until(each.replies[0]) for each in self.held_out]
        requests = [Request(self.reader.inputs(each, answering=True)) for each in told]
        return Trial(requests, Sampler(), TRIAL_TOKENS, self.reader.end_token_ids)

    def tell(self, drawn: Sequence[int]) -> None:
        """Have the target reply to rows that it has not yet replied to."""
        opened = {index: self.opened(self.rows[index]) for index in sorted({*drawn} - {*self.told})}
        new = {index: said for index, said in opened.items() if said is not None}
        if new:
            told = self.reader.regenerated(list(new.values()), self.regenerate)
            for index, said in zip(new, told, strict=True):
                self.told[index] = replace(said, images=self.rows[index].images)

    def opened(self, said: Conversation) -> Conversation | None:
        """The conversation with its images; None, with a warning, if one of them cannot be read."""
        try:
            return None if said.where in self.damaged.found else said.opened()
        except MediaError as error:
            self.damaged.add(said.where, error)
            return None

    def example(self, index: int) -> TrainingExample | None:
        """The sequence of a row; None if it is too long, or has images that cannot be read."""
        if index in self.skipped:
            return None
        if self.regenerate:
            self.tell([index])
        said = self.opened(self.told.get(index, self.rows[index]))
        if said is None:
            return None
        example = self.reader.example(said)
        length = len(example.learnt)
        if self.max_length is None or length <= self.max_length:
            return example
        self.skipped.add(index)
        logger.warning(
            "data: row %d has %d tokens, %d are allowed; %d of %d rows skipped so far",
            index + 1,
            length,
            self.max_length,
            len(self.skipped),
            len(self.rows),
        )
        return None
