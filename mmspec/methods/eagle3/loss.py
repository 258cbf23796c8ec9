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
from mmspec.training.losses.base import Blocks, DrafterLoss, Reading, token_loss

__all__ = ["Eagle3Loss", "unroll"]

MAX_STEPS = 16


def unroll(
    head: FeatureHead,
    embeddings: Tensor,
    features: Tensor,
    steps: int,
    first: int = 0,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the head's states when it feeds back its own states from every token on.

    Step i of the row of token t holds token t + i and the state of step i - 1, at the next position. It sees
    the rows that step 0 read up to token t, and its own chain, as in decoding with t as the root.

    Args:
        head: whose layer runs with `sdpa`.
        embeddings, features: [B, L, d] at each token.
        steps: n, step 0 included.
        first: rows before this one are read in step 0 alone.
        positions: [B, L] or [3, B, L] of the tokens; None where the head counts its rows.

    Returns:
        [B, L - 1 - first, n, d]; row j is that of token j + 1 + first. Beyond the end it holds padding.
    """
    length = embeddings.shape[1] - 1
    place, cache = torch.arange(length, device=embeddings.device), DynamicCache()
    at = place[None] if positions is None else positions[..., :-1]  # the position of the token before
    state = head(head.fuse(embeddings[:, 1:], features[:, :-1]), at, None, cache)[:, first:]
    seen, rows = (place <= place[:, None])[first:], length - first
    window: int | None = getattr(head.config, "sliding_window", None)
    root, stands = place[first:, None], place.expand(rows, -1)  # positions of the rows read so far
    states, own = [state], torch.eye(rows, dtype=torch.bool, device=place.device)
    for step in range(1, steps):
        ahead = pad(embeddings[:, first + 1 + step :], (0, 0, 0, step))[:, :rows]
        seen = torch.cat([seen, own], dim=1)
        stands = torch.cat([stands, (root + step).expand(-1, rows)], dim=1)
        near = seen if window is None else seen & (root + step - stands < window)
        state = head(head.fuse(ahead, state), at[..., first:] + step, near[None, None], cache)
        states.append(state)
    return torch.stack(states, dim=2)


class Eagle3Loss(DrafterLoss):
    """The loss of an EAGLE-3 head, or of an MTP layer, on sequences that its target reads.

    Args:
        steps: n of the training-time test; 7 in the release.
        discount: weight of step i is discount^i.

    Raises:
        InputError: `steps` is out of range.
    """

    def __init__(
        self, head: FeatureHead, target: CausalTarget, *, steps: int = 5, discount: float = 0.8
    ) -> None:
        super().__init__(head, target)
        if not 1 <= steps <= MAX_STEPS:
            raise InputError("steps", steps, f"must be an integer from 1 to {MAX_STEPS}")
        self.steps, self.discount = steps, discount

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures: how often each step's likeliest token is the target's.

        Each step's cross-entropy is averaged over its learnt tokens, except those for which the target's
        likeliest token is not in the head's vocabulary.
        """
        reading = self.read(batch)
        blocks = Blocks.of(reading.learnt, self.steps)
        states = self.states(reading, blocks, batch.examples)
        place = blocks.row[:, None], blocks.ahead
        goals = self.goals(reading, place, blocks.counted, conditional=True)
        counted = blocks.counted & goals.known[goals.at]
        losses, agreements = [], []
        for step, learnt in enumerate(counted.unbind(1)):
            logits = self.head.logits(states[learnt, step], self.read_out)[:, None]
            goal = replace(goals, at=goals.at[learnt, step, None])
            loss, agreement = token_loss(logits, goal, learnt[learnt, None], 1.0)
            losses.append(self.discount**step * loss)
            agreements.append(agreement)
        return torch.stack(losses).sum(), {"agreement": torch.cat(agreements)}

    def states(self, reading: Reading, blocks: Blocks, examples: Sequence[TrainingExample]) -> Tensor:
        """Return [m, n, d] the head's states at every root; sequences run one by one, without padding.

        Rows of prompts and of padding are many; they are computed in step 0 alone.
        """
        found = []
        for row, length in enumerate(reading.lengths):
            rows = blocks.before[blocks.row == row]  # row j is that of token j + 1
            first = int(rows.min()) if len(rows) else length - 2
            own = {tap: states[row : row + 1, :length] for tap, states in reading.taps.items()}
            features = self.head.join([own[tap] for tap in self.head.taps])
            counted = self.head.position_lag is None
            positions = None if counted else self.target.positions(examples[row].inputs)[0]
            unrolled = unroll(self.head, own[EMBEDDINGS], features, self.steps, first, positions)
            found.append(unrolled[0, rows - first])
        return torch.cat(found)
