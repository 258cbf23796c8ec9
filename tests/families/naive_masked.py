"""Slow decoding of masked language models: one row, lists, no cache, forward passes over all places.

Each twin returns the tokens of the output, and how many forwards decided them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

#: Scores over the vocabulary, a place of the output and how many are decided -> a token, and the probability
#: of every token.
Choose = Callable[[list[float], int, int], tuple[int, list[float]]]


def scores_of(model: PreTrainedModel, sequence: Sequence[int], block: int | None = None) -> list[list[float]]:
    """Logits [L, V] at all places of a sequence; a block of places sees itself and those before it."""
    place = torch.arange(len(sequence))
    sees = torch.ones(len(sequence), len(sequence), dtype=torch.bool)
    if block is not None:
        sees = place[:, None] // block >= place // block
    mask = torch.zeros(sees.shape, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
    inputs = {"attention_mask": mask[None, None], "position_ids": place[None], "use_cache": False}
    with torch.inference_mode():
        logits: list[list[float]] = model(torch.tensor([[*sequence]]), **inputs).logits[0].tolist()
    return logits


def most_confident(
    scores: list[list[float]], open_places: Sequence[int], choose: Choose, count: int, decided: int
) -> dict[int, int]:
    """Tokens of the places of the most probable ones: place -> token; of equals the leftmost.

    Each is chosen with the noise that its place has while so many are decided.
    """
    ranked = []
    for place in open_places:
        token, probabilities = choose(scores[place], place, decided)
        ranked.append((-probabilities[token], place, token))
    return {place: token for _, place, token in sorted(ranked)[:count]}


def unmask_everywhere(
    model: PreTrainedModel,
    prompt: Sequence[int],
    length: int,
    choose: Choose,
    block: int | None = None,
    places: int = 1,
) -> tuple[list[int], int]:
    """LLaDA (2502.09992, section 2.4), and Dream, whose score of a place stands at the one before.

    All places see each other. `places` are decided in each forward, of the first block that is not complete.
    """
    mask, shift = model.config.mask_token_id, int(model.config.predicts == "next")
    output, block, forwards = [mask] * length, block or length, 0
    is_open = [True] * length
    while any(is_open):
        first = is_open.index(True) // block * block
        scores = scores_of(model, [*prompt, *output])[len(prompt) - shift :]
        forwards += 1
        inside = [place for place in range(first, min(first + block, length)) if is_open[place]]
        for place, token in most_confident(scores, inside, choose, places, is_open.count(False)).items():
            output[place], is_open[place] = token, False
    return output, forwards


def unmask_blocks(
    model: PreTrainedModel, prompt: Sequence[int], length: int, choose: Choose, places: int = 1
) -> tuple[list[int], int]:
    """SDAR (2510.06303): blocks of absolute places, the first of which may begin inside the prompt.

    A block is decided with nothing behind it, and read clean by those that follow. The last one is filled
    whole, until all that was asked for is decided.
    """
    block, mask, start = model.config.block_length, model.config.mask_token_id, len(prompt)
    sequence, forwards = [*prompt], 0
    while len(sequence) < start + length:
        begin = len(sequence)
        end = (begin // block + 1) * block
        sequence += [mask] * (end - begin)
        inside = {*range(begin, end)}
        while any(place < start + length for place in inside):
            scores = scores_of(model, sequence, block)[start:]
            forwards += 1
            open_places = sorted(place - start for place in inside)
            decided = most_confident(scores, open_places, choose, places, end - start - len(inside))
            for place, token in decided.items():
                sequence[start + place] = token
            inside -= {start + place for place in decided}
    return sequence[start : start + length], forwards


def unmask_doubting(
    model: PreTrainedModel,
    prompt: Sequence[int],
    length: int,
    choose: Choose,
    threshold: float,
    block: int | None = None,
    places: int = 1,
) -> tuple[list[int], int, int]:
    """Like `unmask_everywhere`, but masks uncertain tokens again; also returns the number of these places.

    Places of the block that were decided in earlier forwards, and whose tokens have come to be less probable
    than `threshold`, are opened again: the least probable first, one fewer than this forward decides.
    """
    mask, output, block, forwards, again = model.config.mask_token_id, [0] * length, block or length, 0, 0
    is_open = [True] * length
    while any(is_open):
        first = is_open.index(True) // block * block
        seen = [mask if is_open[place] else output[place] for place in range(length)]
        scores = scores_of(model, [*prompt, *seen])[len(prompt) :]
        forwards += 1
        inside = range(first, min(first + block, length))
        still, count = [place for place in inside if is_open[place]], is_open.count(False)
        decided = most_confident(scores, still, choose, places, count)
        kept = [
            (choose(scores[place], place, count)[1][output[place]], place)
            for place in inside
            if not is_open[place]
        ]
        doubted = sorted(each for each in kept if each[0] < threshold)[: len(decided) - 1]
        for place, token in decided.items():
            output[place], is_open[place] = token, False
        for _, place in doubted:
            is_open[place] = True
        again += len(doubted)
    return output, forwards, again
