"""Loss of heads that feed back their own states: EAGLE-3 (2503.01840, section 3.1), and MTP layers.

Training imitates decoding (training-time test): each step reads the head's states of the step before, and the
true tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from mmspec.errors import InputError
from mmspec.heads.model import EMBEDDINGS, FeatureHead
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from mmspec.training.losses.base import (
    Blocks,
    DrafterLoss,
    Reading,
    check_anchors,
    draw_anchors,
    token_loss,
)

__all__ = ["Eagle3Loss", "unroll"]

MAX_STEPS = 16


def unroll(
    head: FeatureHead,
    embeddings: Tensor,
    features: Tensor,
    steps: int,
    roots: Tensor,
    positions: Tensor | None = None,
) -> list[Tensor]:
    """Return the head's states when it feeds back its own states from some tokens on.

    Step i of the row of token t holds token t + i and the state of step i - 1, at the next position. It sees
    the rows that step 0 read up to token t, and its own chain, as in decoding with t as the root.

    Args:
        head: whose layer runs with `sdpa`.
        embeddings, features: [B, L, d] at each token.
        steps: n, step 0 included.
        roots: [R] rows that are unrolled; row j is that of token j + 1.
        positions: [B, L] or [3, B, L] of the tokens; None where the head counts its rows.

    Returns:
        The states of each step: [B, L - 1, d] of step 0 at all rows, and n - 1 times [B, R, d] of the later
        steps at the roots. Beyond the end they hold padding.
    """
    length = embeddings.shape[1] - 1
    place, cache = torch.arange(length, device=embeddings.device), DynamicCache()
    at = place[None] if positions is None else positions[..., :-1]  # the position of the token before
    states = [head(head.fuse(embeddings[:, 1:], features[:, :-1]), at, None, cache)]
    state, root, ahead = states[0][:, roots], roots[:, None], pad(embeddings[:, 1:], (0, 0, 0, steps))
    if not len(roots):  # layers of some families cannot run without rows
        return states + [state] * (steps - 1)
    seen, own = place <= root, torch.eye(len(roots), dtype=torch.bool, device=place.device)
    window: int | None = getattr(head.config, "sliding_window", None)
    stands = place.expand(len(roots), -1)  # positions of the rows read so far
    for step in range(1, steps):
        seen = torch.cat([seen, own], dim=1)
        stands = torch.cat([stands, (root + step).expand(-1, len(roots))], dim=1)
        near = seen if window is None else seen & (root + step - stands < window)
        rows = head.fuse(ahead[:, roots + step], state)
        state = head(rows, at[..., roots] + step, near[None, None], cache)
        states.append(state)
    return states


class Eagle3Loss(DrafterLoss):
    """The loss of an EAGLE-3 head, or of an MTP layer, on sequences that its target reads.

    Args:
        steps: n of the training-time test; 7 in the release.
        anchors: tokens of a sequence from which the head feeds back its own states, drawn in each step of
            the training; None for all. Step 0 learns all tokens, so that fewer anchors train on more text in
            the same time.
        discount: weight of step i is discount^i.

    Raises:
        InputError: `steps` or `anchors` is out of range.
    """

    def __init__(
        self,
        head: FeatureHead,
        target: CausalTarget,
        *,
        steps: int = 5,
        anchors: int | None = None,
        discount: float = 0.8,
    ) -> None:
        super().__init__(head, target)
        if not 1 <= steps <= MAX_STEPS:
            raise InputError("steps", steps, f"must be an integer from 1 to {MAX_STEPS}")
        if anchors is not None:
            check_anchors(anchors)
        self.steps, self.anchors, self.discount = steps, anchors, discount

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures: how often each step's likeliest token is the target's.

        Each step's cross-entropy is averaged over its learnt tokens, except those for which the target's
        likeliest token is not in the head's vocabulary.
        """
        reading = self.read(batch)
        blocks = Blocks.of(reading.learnt, self.steps)
        every = torch.arange(len(blocks.row), device=blocks.row.device)
        drawn = every if self.anchors is None else draw_anchors(blocks.row, self.anchors, batch.seed)
        states = self.states(reading, blocks, drawn, batch.examples)
        place = blocks.row[:, None], blocks.ahead
        goals = self.goals(reading, place, blocks.counted, conditional=True)
        counted = blocks.counted & goals.known[goals.at]
        losses, agreements = [], []
        for step, state in enumerate(states):
            of = drawn if step else every
            learnt = counted[of, step]
            logits = self.head.logits(state[learnt], self.read_out)[:, None]
            goal = replace(goals, at=goals.at[of[learnt], step, None])
            loss, agreement = token_loss(logits, goal, learnt[learnt, None], 1.0)
            losses.append(self.discount**step * loss)
            agreements.append(agreement)
        return torch.stack(losses).sum(), {"agreement": torch.cat(agreements)}

    def states(
        self, reading: Reading, blocks: Blocks, drawn: Tensor, examples: Sequence[TrainingExample]
    ) -> list[Tensor]:
        """Return the head's states of each step: [m, d] at all roots, then [k, d] at the drawn ones [k].

        Sequences run one by one, without padding.
        """
        found = []
        for row, length in enumerate(reading.lengths):
            own = {tap: states[row : row + 1, :length] for tap, states in reading.taps.items()}
            features = self.head.join([own[tap] for tap in self.head.taps])
            counted = self.head.position_lag is None
            positions = None if counted else self.target.positions(examples[row].inputs)[0]
            roots = blocks.before[drawn[blocks.row[drawn] == row]]
            first, *later = unroll(self.head, own[EMBEDDINGS], features, self.steps, roots, positions)
            found.append([first[0, blocks.before[blocks.row == row]], *(state[0] for state in later)])
        return [torch.cat(step) for step in zip(*found, strict=True)]
