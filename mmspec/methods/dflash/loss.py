"""Loss of heads that denoise blocks (DFlash, 2602.06036; DSpark, 2607.05147), on many blocks at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot, pad
from torch.nn.utils.rnn import pad_sequence

from mmspec.methods.dflash.head import DFlashHead
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.losses.base import (
    Blocks,
    DrafterLoss,
    Reading,
    check_anchors,
    draw_anchors,
    token_loss,
)
from mmspec.training.losses.goals import Goals

__all__ = ["DFlashLoss", "denoise"]

AXES = 3  # of M-RoPE


class DFlashLoss(DrafterLoss):
    """Cross-entropy with the target's distributions, in blocks after tokens of the answers.

    A confidence head learns the overlap of the target's distribution with that of its slot.

    Args:
        anchors: blocks of a sequence, drawn from its answer; all sequences share one forward pass.
        discount: weight of the token i places after the first is discount^i, as later ones are reached less.

    Raises:
        InputError: `anchors` is out of range.
    """

    def __init__(
        self, head: DFlashHead, target: CausalTarget, *, anchors: int = 32, discount: float = 0.9
    ) -> None:
        super().__init__(head, target)
        check_anchors(anchors)
        self.anchors, self.discount = anchors, discount

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures: how often the likeliest token of each slot is the target's."""
        reading = self.read(batch)
        blocks = Blocks.of(reading.learnt, self.head.config.depth)
        # blocks begin with tokens of the answer; those of prompts may have no embedding (slots of captions)
        emitted = reading.learnt[blocks.row, blocks.ahead[:, 0]]
        blocks = blocks.at(emitted)
        blocks = blocks.at(draw_anchors(blocks.row, self.anchors, batch.seed))
        at = blocks.row[:, None], blocks.ahead
        goal = self.goals(reading, at, blocks.counted)
        counted, before = blocks.counted & goal.known[goal.at], reading.tokens[at]
        places = None
        if self.head.config.mrope_section is not None:
            places = token_positions(self.target, batch)
        hidden = denoise(self.head, self.target, reading, blocks, places)
        logits = self.head.logits(hidden, self.read_out)
        if self.head.markov_head is not None:
            state, biases = None, []
            for place in range(counted.shape[1]):
                tokens, slots = before[:, place], hidden[:, place]
                bias, state = self.head.told(place, tokens, slots, state, self.target.embed)
                biases.append(bias)
            logits = logits + torch.stack(biases, 1)
        loss, agreement = token_loss(logits, goal, counted, self.discount)
        figures = {"agreement": agreement}
        if self.head.has_candidates:
            anchor = self.head.join([reading.taps[tap][blocks.row, blocks.before] for tap in self.head.taps])
            choice, figures["chosen"] = self.choose(hidden, logits, anchor, before, goal, counted)
            loss = loss + choice
        if self.head.confidence_head is not None:
            common = goal.common(logits.detach())
            predicted = self.head.confidences(hidden.detach(), before).float()
            nats = binary_cross_entropy_with_logits(predicted, common, reduction="none")
            figures["confidence"] = (nats * counted).sum() / counted.sum().clamp_min(1)
            loss = loss + figures["confidence"]
        return loss, figures

    def choose(
        self, hidden: Tensor, logits: Tensor, anchor: Tensor, before: Tensor, goal: Goals, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the scores of candidates with the target's probabilities of them.

        Slots behind a token that is no candidate have no scores by `LatticeCorrelator`, and do not count.

        Args:
            hidden: [m, D, d] states of the slots.
            logits: [m, D, V'].
            anchor: [m, d] newest rows of the context.
            before: [m, D] tokens before the slots.
            goal: the target's distributions.
            counted: [m, D] learnt slots.

        Returns:
            The loss, and [D] how often the best candidate is the target's likeliest token.
        """
        lattice = self.head.lattice(hidden, logits, anchor, self.target.embed)
        scores = torch.cat(
            [
                self.head.scores(lattice, place, before[:, place, None], hidden[:, place, None])
                for place in range(before.shape[1])
            ],
            1,
        )
        if lattice.pairs is not None:
            follows = (lattice.tokens[:, :-1] == before[:, 1:, None]).any(-1)
            counted = counted & pad(follows, (1, 0), value=True)
        weights = counted * self.discount ** torch.arange(counted.shape[1], device=counted.device)
        wanted = goal.table[goal.at[..., None], lattice.index]
        nats = -(wanted * scores.float().log_softmax(-1)).sum(-1)
        best = lattice.index.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        agreement = ((best == goal.meant()) & counted).sum(0) / counted.sum(0).clamp_min(1)
        return (nats * weights).sum() / weights.sum().clamp_min(1.0), agreement


def token_positions(target: CausalTarget, batch: DrafterBatch) -> Tensor:
    """Positions [3, B, L] of the tokens of a batch in the target; those of padding are 0."""
    found = [target.positions(example.inputs)[0].flatten(0, -2)[-AXES:] for example in batch.examples]
    return pad_sequence([each.expand(AXES, -1).T for each in found], batch_first=True).movedim(-1, 0)


def denoise(
    head: DFlashHead, target: CausalTarget, reading: Reading, blocks: Blocks, places: Tensor | None = None
) -> Tensor:
    """Denoise m blocks in whole sequences, in one forward pass.

    Args:
        head: it denoises; `target` embeds the newest token of each block.
        target: see `head`.
        reading: the sequences.
        blocks: in their answers.
        places: [3, B, L] positions of the tokens; None if these are their indices.

    Returns:
        [m, D, d] states of the predicting slots, equal to those of decoding, block by block.
    """
    rows, length = reading.tokens.shape
    same = one_hot(blocks.row, rows)
    place = ((same.cumsum(0) - 1) * same).sum(-1)  # of each block among those of its sequence
    count, slots = int(same.sum(0).amax()), head.config.block
    newest = torch.zeros(rows, count, dtype=torch.long, device=place.device)
    root = newest.clone()
    newest[blocks.row, place] = reading.tokens[blocks.row, blocks.ahead[:, 0]]
    root[blocks.row, place] = blocks.ahead[:, 0]
    context = head.join([reading.taps[tap] for tap in head.taps])
    block = head.slots(newest, target.embed).flatten(1, 2).to(context.dtype)
    index = torch.arange(length, device=place.device)
    slot = torch.arange(slots, device=place.device)
    tokens = torch.cat([index.expand(rows, -1), (root[..., None] + slot).flatten(1)], 1)
    positions = tokens
    if places is not None:  # a block is text behind its newest token
        newest_at = places.gather(-1, root.expand(len(places), -1, -1))
        positions = torch.cat([places, (newest_at[..., None] + slot).flatten(-2)], -1)
    behind = (index < root[..., None]).repeat_interleave(slots, 1)  # [B, m n, L]
    own = torch.eye(count, dtype=torch.bool, device=place.device)
    own = own.repeat_interleave(slots, 0).repeat_interleave(slots, 1)
    seen = torch.cat([behind, own.expand(rows, -1, -1)], 2)
    mask = [(seen & near)[:, None] for near in head.near(tokens[:, length:], tokens)]
    hidden: Tensor = head(block, context, positions, mask).unflatten(1, (count, slots))
    first = 0 if head.config.anchor_predicts else 1
    return hidden[blocks.row, place, first:]
