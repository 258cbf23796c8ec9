"""Conversations of a list as data for drafters: drawn anew in each step, never cut, skipped if too long."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

import numpy as np

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError
from mmspec.training.data.conversations import Conversation, ConversationReader
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, Trial

__all__ = ["ConversationRows"]

logger = logging.getLogger(__name__)

STAGE = 12
TRIAL_ROWS, TRIAL_TOKENS = 4, 96
ATTEMPTS = 100  # rows that are drawn in place of those that are too long, before a step is given up


class ConversationRows:
    """Data of given conversations, of which the last four are held out.

    Args:
        reader: of the target's tokens.
        rows: with replies.
        batch_size: sequences a step and process.
        seed: of what is drawn for each step.
        max_length: longer sequences, in tokens, are skipped with a warning; None takes what the target can.
        regenerate: longest reply that the target writes itself, in place of the row's; 0 keeps the rows'.

    Raises:
        InputError: there are too few.
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
        self.rows, self.held_out = rows[:-TRIAL_ROWS], rows[-TRIAL_ROWS:]
        self.skipped: set[int] = set()
        self.told: dict[int, Conversation] = {}

    def batch(self, step: int, process: int) -> DrafterBatch:
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        drawn = [int(index) for index in rng.integers(len(self.rows), size=self.batch_size + ATTEMPTS)]
        if self.regenerate:
            self.tell(drawn[: self.batch_size])
        fitting = (example for index in drawn if (example := self.example(index)) is not None)
        examples = tuple(islice(fitting, self.batch_size))
        if len(examples) < self.batch_size:
            allowed = f"rows of at most {self.max_length} tokens; {len(self.skipped)} are longer so far"
            raise InputError("max_length", self.max_length, allowed)
        return DrafterBatch(examples, int(rng.integers(2**62)))

    def trial(self) -> Trial:
        told = [each.until(each.replies[0]) for each in self.held_out]
        requests = [Request(self.reader.inputs(each, answering=True)) for each in told]
        return Trial(requests, Sampler(), TRIAL_TOKENS, self.reader.end_token_ids)

    def tell(self, drawn: Sequence[int]) -> None:
        """Have the target reply to rows that it has not yet replied to."""
        new = sorted({index for index in drawn if index not in self.told})
        if new:
            told = self.reader.regenerated([self.rows[index] for index in new], self.regenerate)
            self.told |= dict(zip(new, told, strict=True))

    def example(self, index: int) -> TrainingExample | None:
        """The sequence of a row; None if it is too long."""
        if index in self.skipped:
            return None
        if self.regenerate:
            self.tell([index])
        example = self.reader.example(self.told.get(index, self.rows[index]))
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
