"""Losses of EAGLE heads, which learn their target's hidden states and its distributions.

ViSpec (2509.15235) first trains on text with EAGLE's loss, and then with probabilities and ranks on long
answers about images. Here all parts are trained together, from random weights, each with a weight of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, smooth_l1_loss

from mmspec.compressors.gate import Gate
from mmspec.core.cache import RaggedCache
from mmspec.core.draft import Nodes
from mmspec.errors import InputError
from mmspec.heads.model import HIDDEN
from mmspec.methods.eagle.head import EagleHead
from mmspec.targets import CausalTarget
from mmspec.targets.attention import mask_dtype
from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from mmspec.training.losses.base import DrafterLoss, Reading
from mmspec.training.losses.goals import Goals, agrees, soft_cross_entropy

__all__ = ["EagleLoss", "HeadRows", "ViSpecLoss", "imitation", "positions_of", "ranking", "read_guesses"]

STATE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1  # of both EAGLE-1 and LANTERN
NOISE = 0.2  # width of the uniform noise on states, which makes the head robust to its own predictions
RANKS = 10  # number of likeliest tokens whose order ViSpec learns
NOISE_LENGTH = 512  # EAGLE scales the noise by this over the length, which is too much for short sequences


@dataclass(frozen=True)
class HeadRows:
    """Rows of a batch as a head reads them in decoding, and which of its predictions are learnt.

    Attributes:
        rows: [B, M, d], padded on the right.
        position_ids: [B, M], or [3, B, M].
        source: [B, M] index of the token of each row; -1 for images and padding.
        counted: [B, M] True at rows of text whose next token is learnt; images are never predicted.
    """

    rows: Tensor
    position_ids: Tensor
    source: Tensor
    counted: Tensor

    def at(self, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [m] and places [m], among [B, L], of the tokens of the counted rows [B, M]."""
        return counted.nonzero(as_tuple=True)[0], self.source[counted]


class EagleLoss(DrafterLoss):
    """Smooth L1 between predicted and true hidden states, and soft cross entropy between their distributions.

    Images are read as the head's config states; the loss is therefore that of MSD and SpecVLM too.
    """

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures: its two parts, and how often the likeliest tokens agree."""
        reading = self.read(batch)
        made = self.rows(batch.examples, reading, self.noisy(reading, batch.seed))
        predicted = self.head(made.rows, made.position_ids)[made.counted]
        # row t: token t and the state at t - 1 give the state at t, which predicts token t + 1
        at = made.at(made.counted)
        true, goal = reading.taps[HIDDEN][at], self.meant(reading, at)
        return imitation(predicted, true, self.read_out(predicted), goal)

    def meant(self, reading: Reading, at: tuple[Tensor, Tensor]) -> Goals:
        """Return the target's distributions at its states of rows and places [m]."""
        return self.goals(reading, at, torch.ones_like(at[0], dtype=torch.bool), conditional=True)

    def noisy(self, reading: Reading, seed: int) -> Tensor:
        """[B, L, d] final hidden states with noise."""
        states = reading.taps[HIDDEN]
        generator = torch.Generator(states.device).manual_seed(seed)
        noise = torch.rand(states.shape, generator=generator, device=states.device) - 0.5
        return states + noise.to(states.dtype) * (NOISE * min(1.0, NOISE_LENGTH / states.shape[1]))

    def rows(self, examples: Sequence[TrainingExample], reading: Reading, states: Tensor) -> HeadRows:
        """Make the rows that the head reads, with hidden states [B, L, d] at the tokens."""
        made = self.head.read_prompts(reading.prompts(states))
        positions = positions_of(self.target, examples)
        slot = made.slot.expand(*positions.shape[:-1], -1)
        learnt_next = pad(reading.learnt, (0, 1)).gather(1, made.source.clamp_min(0) + 1)
        counted = learnt_next & (made.source >= 0)
        return HeadRows(made.rows, positions.gather(-1, slot), made.source, counted)


def imitation(
    predicted: Tensor, true: Tensor, logits: Tensor, goal: Goals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return EAGLE's loss (2401.15077, section 4.2) of hidden states [m, d] and their logits, and its parts.

    Logits [m, V'] are of the tokens that the head drafts. Where the target's likeliest token is not one of
    these, the token loss is 0, and the tokens do not agree.
    """
    count = max(1, len(true))
    states = smooth_l1_loss(predicted, true, reduction="none").mean(-1).sum() / count
    known = goal.known[goal.at]
    tokens = (soft_cross_entropy(logits, goal.table, goal.at) * known).sum() / count
    agreement = (agrees(logits, goal.meant()) & known).sum() / count
    loss = STATE_WEIGHT * states + TOKEN_WEIGHT * tokens
    return loss, {"states": states, "tokens": tokens, "agreement": agreement}


def positions_of(target: CausalTarget, examples: Sequence[TrainingExample]) -> Tensor:
    """[B, L] position ids of the target, padded; [3, B, L] where any sequence has three axes."""
    found = [target.positions(example.inputs)[0] for example in examples]
    axes = max((each.shape[:-2] for each in found), key=len)
    longest = max(each.shape[-1] for each in found)
    return torch.cat(
        [pad(each.expand(*axes, 1, -1), (0, longest - each.shape[-1])) for each in found], dim=-2
    )


class ViSpecLoss(EagleLoss):
    """L1 distance of probabilities, ranks of the likeliest tokens, and EAGLE's loss; at two depths.

    The second depth is a step of multi-token prediction: a row holds the head's own prediction of the state
    before it, as the rows of candidates do.

    Args:
        imitation: weight of EAGLE's loss, ViSpec's first stage; 0 leaves the second stage alone.
        probabilities: weight of the mean L1 distance between distributions.
        ranks: weight of `ranking`.

    Raises:
        InputError: the head's compressor is random, so that its choices would differ at the second depth.
    """

    def __init__(
        self,
        head: EagleHead,
        target: CausalTarget,
        *,
        imitation: float = 1.0,
        probabilities: float = 10.0,
        ranks: float = 0.1,
    ) -> None:
        super().__init__(head, target)
        if isinstance(head.compressor, Gate):
            raise InputError("compressor", head.config.compressor, "must not choose tokens at random")
        self.imitation, self.probabilities, self.ranks = imitation, probabilities, ranks

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures: its parts, and how often the likeliest tokens agree."""
        reading = self.read(batch)
        states = self.noisy(reading, batch.seed)
        first = self.rows(batch.examples, reading, states)
        hidden = self.head(first.rows, first.position_ids)
        guessed = states.index_put(first.at(first.counted), hidden[first.counted].to(states.dtype))
        second = self.rows(batch.examples, reading, guessed)
        again = second.counted & pad(first.counted[:, :-1], (1, 0))  # rows that follow a prediction
        predicted = torch.cat([hidden[first.counted], read_guesses(self.head, first, second)[again]])
        row, place = (
            torch.cat(parts) for parts in zip(first.at(first.counted), first.at(again), strict=True)
        )
        true, goal = reading.taps[HIDDEN][row, place], self.meant(reading, (row, place))
        logits = self.read_out(predicted).float()
        imitated, figures = imitation(predicted, true, logits, goal)
        count, known, distribution = max(1, len(true)), goal.known[goal.at], goal.table[goal.at]
        distance = ((distribution - logits.softmax(-1)).abs().sum(-1) * known).sum() / count
        order = (ranking(distribution, logits) * known).sum() / count
        loss = self.imitation * imitated + self.probabilities * distance + self.ranks * order
        return loss, figures | {"probabilities": distance, "ranks": order}


def read_guesses(head: EagleHead, first: HeadRows, second: HeadRows) -> Tensor:
    """[B, M, d] the head's states at rows made of its own predictions.

    Such a row sees itself and the rows of true states before it, as the children of a root do in decoding.
    """
    batch, count = first.source.shape
    place = torch.arange(count, device=first.source.device)
    before, own = place < place[:, None], place == place[:, None]
    seen = torch.cat([torch.cat([before | own, before]), torch.cat([torch.zeros_like(own), own])], 1)
    cache = RaggedCache(head.decoder.config, batch, 2 * count, place.device)
    slots, depths = (
        each.expand(batch, -1) for each in (torch.arange(2 * count, device=place.device), place.repeat(2))
    )
    cache.begin_score(slots, 2 * count)
    nodes = Nodes(slots, slots, depths, seen.expand(batch, -1, -1), count - 1)
    mask = cache.attention_mask(nodes, mask_dtype(head.decoder))
    rows = torch.cat([first.rows, second.rows], 1)
    positions = torch.cat([first.position_ids, second.position_ids], -1)
    hidden: Tensor = head(rows, positions, mask, cache)
    return hidden[:, count:]


def ranking(distribution: Tensor, logits: Tensor) -> Tensor:
    """[m] nats of the order in which distributions [m, V] rank their ten likeliest tokens (Plackett-Luce).

    The tokens are drawn one after another, without replacement and from these ten alone, by logits [m, V].
    """
    scores = logits.gather(-1, distribution.topk(min(RANKS, distribution.shape[-1])).indices)
    left = scores.flip(-1).logcumsumexp(-1).flip(-1)  # over the tokens that are not drawn yet
    return (left - scores).sum(-1)
