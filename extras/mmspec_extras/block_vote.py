"""A vote over sizes of blocks: each is another order in which a masked model decides (HEX, 2510.05040)."""

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
        answer: that has the most votes; of equals the one that came first.
        votes: answer -> number.
        forwards: of the model, in all calls.
        texts: of all calls, by block length.
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
    """Answer a prompt by blocks of several lengths, and take the answer that most of them give.

    For quality, not for speed: it takes `samples` outputs of each length, as far as they can still change
    the outcome. Smaller blocks come first, and win where answers have equally many votes.

    Args:
        pipe: of a masked model whose places all see each other.
        prompt, images: as of its calls; one row.
        extract: the answer of a text, such as its last number; texts without one ("") do not vote.
        block_lengths: places of a block.
        samples: outputs of each, with seeds of their own.
        seed: of the first output of each.
        temperature, settings: of every call.

    Raises:
        InputError: no samples or lengths, or a model with blocks of its own.
    """
    if not block_lengths:
        raise InputError("block_lengths", block_lengths, "must hold at least one")
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
