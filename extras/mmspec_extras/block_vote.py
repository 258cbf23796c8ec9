"""Vote over block lengths, each of which gives a masked model another decoding order (HEX, 2510.05040)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.errors import InputError
from mmspec.validation import is_integer

__all__ = ["Election", "block_vote"]


@dataclass(frozen=True)
class Election:
    """Outcome of a vote.

    Attributes:
        answer: the answer with the most votes; the first of several with equally many.
        votes: number of votes by answer.
        forwards: number of forward passes in all calls.
        texts: outputs of all calls, by block length.
    """

    answer: str
    votes: dict[str, int]
    forwards: int
    texts: dict[int, list[str]]


def block_vote(
    pipe: Any,
    prompt: Any,
    images: Any = None,
    *,
    extract: Callable[[str], str] = str.strip,
    block_lengths: Sequence[int] = (8, 16, 32, 64, 128),
    samples: int = 5,
    seed: int = 0,
    temperature: float = 0.9,
    **settings: Any,
) -> Election:
    """Answer a prompt with blocks of several lengths, and return the most frequent answer.

    The vote improves quality, not speed. It takes `samples` outputs of each length, and stops when further
    outputs cannot change the answer. Smaller blocks come first, and decide between equally many votes.

    Args:
        pipe: pipeline of a masked model whose places all see each other.
        prompt, images: see the call of the pipeline; one row.
        extract: function that returns the answer of a text, such as its last number; "" is not counted.
        block_lengths: numbers of places per block.
        samples: number of outputs per block length, each with its own seed.
        seed: seed of the first output of each block length.
        temperature, settings: further arguments of every call.

    Raises:
        InputError: `samples` is not a positive integer, there are no block lengths, or the model has blocks
            of its own.
    """
    if not block_lengths:
        raise InputError("block_lengths", block_lengths, "must contain at least one length")
    if not is_integer(samples) or samples < 1:
        raise InputError("samples", samples, "must be a positive integer")
    votes: Counter[str] = Counter()
    texts: dict[int, list[str]] = {}
    forwards, before = 0, pipe.accelerator
    try:
        for done, length in enumerate(sorted(block_lengths)):
            first, second = [*[count for _, count in votes.most_common(2)], 0, 0][:2]
            if first - second > samples * (len(block_lengths) - done):
                break
            pipe.set_accelerator("low_confidence", block_length=length)
            rows: dict[str, Any] = {} if images is None else {"images": [images] * samples}
            output = pipe(
                [prompt] * samples,
                temperature=temperature,
                seed=[seed + index for index in range(samples)],
                **rows,
                **settings,
            )
            texts[length], forwards = output.text, forwards + output.stats.target_forwards
            votes.update(answer for answer in map(extract, output.text) if answer)
    finally:
        pipe.set_accelerator(before)
    (answer, _), *_ = votes.most_common(1) or [("", 0)]
    return Election(answer, dict(votes), forwards, texts)
