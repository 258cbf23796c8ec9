"""The parallel loop: predict, choose, commit; several cells of an image in one forward.

It knows no decoding order and no model by name. A cell is predicted from the node of its predecessor in
raster order, which attends to the earlier places that are decoded by then. Those that are not yet decoded are
missing, so that every decoding order but raster order itself is lossy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.image_cells import Image, Step, lay_out
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import AcceptanceRule, Request, State, Target, list_prompts
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler, Scores
from mmspec.decoding.sequences import Emission, Sequences
from mmspec.decoding.verdict import take
from mmspec.errors import InputError


class PlaceTarget(Target[State], Protocol[State]):
    """A target whose tokens can be fed at any place of the output, in any order."""

    def score_places(self, state: State, tokens: Tensor, places: Tensor, visible: Tensor) -> Tensor:
        """Feed tokens at chosen places; their keys stay there until others are written over them.

        Args:
            tokens, places: [B, n] token ids, and their output indices.
            visible: [B, n, m] which of the first m places each attends to, besides the prompt.

        Returns:
            [B, n, V] logits of the token after each; [2B, n, V] under guidance.
        """
        ...


class DecodingOrder(ABC):
    """Order in which the cells of an image are decoded. Rows run from left to right.

    Attributes:
        kind: of a token on trial, as a draft of one token: drawn from its first distribution.
        branches: never; a token on trial has no sibling.
        exactness: promise of decoding in this order, as of acceptance rules.
        adaptive: whether tokens are put on trial, so that the order depends on them.
    """

    adaptive: bool = False
    kind: ClassVar[DraftKind] = DraftKind.IID
    branches: ClassVar[bool] = False
    exactness: ClassVar[str] = "lossy"

    @abstractmethod
    def open_rows(self, decoded: Sequence[int], columns: int) -> list[int]:
        """Rows of the image whose next cell may be decoded now.

        Args:
            decoded: number of cells that each row has, from the left.
            columns: cells of a whole row.
        """

    @abstractmethod
    def window(self, columns: int) -> int:
        """Number of cells by which a row is behind the one above, in an image of that many columns."""

    def puts_on_trial(self, row: int, decoded: Sequence[int], columns: int) -> bool:
        """Return whether the first token of that row is put on trial: drawn now, judged a forward later."""
        return False

    def fit(self, target: Target[Any]) -> DecodingOrder:
        """Return this decoding order fitted to a target.

        Raises:
            InputError: the target draws no images, or none that this decoding order fits.
        """
        return self


@torch.inference_mode()
def decode_cells(
    target: PlaceTarget[State],
    order: DecodingOrder,
    rule: AcceptanceRule,
    sampler: Sampler,
    requests: Sequence[Request],
    sequences: Sequences,
    random: RandomStream,
) -> Iterator[Emission]:
    """Decode a batch of images, yielding the tokens that every forward completes in raster order.

    Args:
        target: the model.
        order: chooses the next cells.
        rule: judges tokens that are on trial; sound for the decoding order's kind.
        sampler: logits to distribution, without processors: they look at a path, and there is none.
        requests: B prompts with their grids.
        sequences: B rows that hold the prompts; it grows, and says when all rows are finished.
        random: the rows' random numbers; a cell's noise is that of plain decoding.

    Yields:
        One Emission for the prefill, then one a forward, often of no tokens.

    Raises:
        InputError: a request without a grid, more tokens than a grid has, or logits processors.
    """
    if not requests or sequences.stopping.max_new_tokens == 0:
        return
    stats, started = sequences.stats, perf_counter()
    images = [Image(grid) for grid in check_grids(requests, sampler, sequences)]
    length = max(image.grid.length for image in images)
    capacity = max(map(len, sequences.tokens)) + length
    state, prefill = target.prefill(list_prompts(requests, sampler), capacity)
    scores = sampler.warped(sampler.guided(prefill.logits))
    choice = scores.choose_at(sequences.emitted[:, None], random)
    first = torch.cat([choice, scores.are_finite()], dim=1).tolist()
    for image, (token, _) in zip(images, first, strict=True):
        image.put({0: token})
    kept = torch.zeros(len(images), length, dtype=torch.bool, device=choice.device)
    offered = scores.probabilities()[:, 0]  # [B, V] later: that from which the token on trial was drawn
    stats.target_forwards += 1
    stats.cached_prompt_tokens = prefill.cached_tokens
    stats.prefill_seconds = perf_counter() - started
    yield sequences.extend([image.ready() for image in images], [bool(usable) for _, usable in first])

    while not sequences.finished:
        steps = [image.step(order) for image in images]
        tokens, places, known = lay_out(steps, choice.device)
        kept.scatter_(1, places, known)
        clock = perf_counter()
        logits = target.score_places(state, tokens, places, visible_places(kept, places, steps))
        stats.target_seconds += perf_counter() - clock
        scores = sampler.warped(sampler.guided(logits))
        report = [scores.choose_at(places + 1, random), scores.are_finite().long()]
        if any(step.judged is not None for step in steps):
            report.append(judge(rule, steps, tokens, places, scores, offered, random))
        if any(step.proposed is not None for step in steps):
            node = torch.tensor([step.proposed or 0 for step in steps], device=places.device)
            offered = Scores(take(scores.logits, node), scores.greedy).probabilities()
        usable = []
        for image, step, row in zip(images, steps, torch.cat(report, dim=1).tolist(), strict=True):
            nodes = places.shape[1]
            image.commit(step, chosen=row[:nodes], verdict=row[2 * nodes :])
            usable.append(all(row[nodes + node] for node in step.asked))
        stats.target_forwards += 1
        stats.cache_bytes = state.nbytes()
        yield sequences.extend([image.ready() for image in images], usable)


def visible_places(kept: Tensor, places: Tensor, steps: Sequence[Step]) -> Tensor:
    """[B, n, m] which places each node attends to: its own, and those before it whose keys are kept.

    Args:
        kept: [B, length] places that hold the keys of the token that stands there.
        places: [B, n] of the nodes.
        steps: of the images.
    """
    column = torch.arange(1 + max(step.places[-1] for step in steps), device=places.device)
    here = places[:, :, None]
    return (column == here) | (kept[:, None, : len(column)] & (column < here))


def judge(
    rule: AcceptanceRule,
    steps: Sequence[Step],
    tokens: Tensor,
    places: Tensor,
    scores: Scores,
    offered: Tensor,
    random: RandomStream,
) -> Tensor:
    """Verify the tokens on trial, as drafts of one token (adaptive window of ZipAR, 2412.04062).

    Args:
        tokens, places: [B, n] of the nodes.
        scores: of the nodes.
        offered: [B, V] the distributions that the tokens on trial were drawn from.

    Returns:
        [B, 2] whether each was accepted, and the token after it or in its stead; junk for rows without one.
    """
    root = torch.tensor([[step.judged or 0] for step in steps], device=places.device)
    pair = torch.cat([root, (root + 1).clamp_max(places.shape[1] - 1)], dim=1)
    draft = Draft.chain(tokens.gather(1, pair), DraftKind.IID, q=offered[:, None].expand(-1, 2, -1))
    logits = scores.logits.gather(1, pair[:, :, None].expand(-1, -1, scores.logits.shape[-1]))
    first = places.gather(1, root)[:, 0] + 1
    verdict = rule.verify(draft, Scores(logits, scores.greedy), random, first)
    return torch.stack([verdict.accepted, verdict.next_token], dim=1)


def check_grids(requests: Sequence[Request], sampler: Sampler, sequences: Sequences) -> list[ImageGrid]:
    """Grids of the requests.

    Raises:
        InputError: a request has none, one has fewer tokens than are asked for, or there are processors.
    """
    if sampler.processors:
        raise InputError("logits_processor", len(sampler.processors), "none: cells are not decoded in order")
    grids = [request.grid for request in requests if request.grid is not None]
    if len(grids) < len(requests):
        raise InputError("accelerator", "a decoding order of cells", "a model of image tokens")
    shortest, asked = min(grid.length for grid in grids), sequences.stopping.max_new_tokens
    if asked > shortest:
        raise InputError("max_new_tokens", asked, f"at most {shortest}, the tokens of an image")
    return grids
