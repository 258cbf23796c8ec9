"""Loss of a FLASH head, which learns the next K hidden states and distributions of its target."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from mmspec.heads.model import HIDDEN
from mmspec.methods.flash.head import FlashHead
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.losses.base import DrafterLoss, Reading, learnt_pairs, token_loss
from mmspec.validation import require_number
from mmspec.visual_tokens.splice import PromptRows

__all__ = ["FlashLoss"]

# FLASH has 1.0 and 0.1, for a vocabulary of 32,000 tokens; acceptance depends on the token loss
STATE_WEIGHT, TOKEN_WEIGHT = 1.0, 1.0
NOISE = 0.05


class FlashLoss(DrafterLoss):
    """Smooth L1 on hidden states and soft cross-entropy on tokens, averaged over the learnt pairs.

    FLASH, 2505.12728, section 3.4.

    Args:
        own_guesses: share of the answers' states that are replaced by the head's own predictions, which it
            reads beyond its first block (and everywhere with `block=1`). The paper has none.

    Raises:
        InputError: `own_guesses` is not a share.
    """

    def __init__(self, head: FlashHead, target: CausalTarget, *, own_guesses: float = 0.0) -> None:
        super().__init__(head, target)
        require_number("own_guesses", own_guesses, 0.0, 1.0, "must be a share from 0 to 1")
        self.own_guesses = own_guesses

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures: its two parts, and the agreement [K] of likeliest tokens by offset."""
        reading, block = self.read(batch), self.head.config.block
        tokens, states = reading.tokens, reading.taps[HIDDEN]
        spliced, hidden = run(self.head, reading, self.features(reading, batch.seed))
        text = spliced.source.clamp_min(0)[..., None].expand(-1, -1, block)
        # no draft begins at a token that is not in the vocabulary, such as the label of a generated image
        drafted_from = (spliced.source >= 0) & (tokens < self.head.config.vocabulary).gather(1, text[..., 0])
        counted = learnt_pairs(reading.learnt, block).gather(1, text) & drafted_from[..., None]
        row, place = counted[..., 0].nonzero(as_tuple=True)  # offset 0 counts wherever another does
        counted = counted[row, place]  # [m, K]
        ahead = spliced.source[row, place][:, None] + torch.arange(block, device=tokens.device)
        at = row[:, None], ahead.clamp_max(tokens.shape[1] - 1)
        predicted, true = self.head.predict(hidden[row, place], block), states[at]  # [m, K, d]
        distance = smooth_l1_loss(predicted, true, reduction="none").mean(-1)
        state_loss = (distance * counted).sum() / counted.sum().clamp_min(1)
        logits = self.read_out(predicted) + self.head.bias(tokens[at])
        goal = self.goals(reading, at, counted)
        tokens_loss, agreement = token_loss(logits, goal, counted & goal.known[goal.at], 1.0)
        loss = STATE_WEIGHT * state_loss + TOKEN_WEIGHT * tokens_loss
        return loss, {"states": state_loss, "tokens": tokens_loss, "agreement": agreement}

    def features(self, reading: Reading, seed: int) -> Tensor:
        """[B, L, d] final hidden states for the head: with noise, or partly its own predictions."""
        states = reading.taps[HIDDEN]
        generator = torch.Generator(states.device).manual_seed(seed)
        noise = 2 * torch.rand(states.shape, generator=generator, device=states.device) - 1
        features = states + (NOISE * noise).to(states)
        if not self.own_guesses:
            return features
        drawn = torch.rand(states.shape[:2], generator=generator, device=states.device) < self.own_guesses
        return features.where(~(drawn & reading.learnt)[..., None], own_states(self.head, reading, features))


@torch.no_grad()
def own_states(head: FlashHead, reading: Reading, features: Tensor) -> Tensor:
    """[B, L, d] the head's predictions of states, from features [B, L, d]; in images, the target's states."""
    states = reading.taps[HIDDEN]
    spliced, hidden = run(head, reading, features)
    predicted = head.predict(hidden, 1)[..., 0, :].to(states)
    row, place = (spliced.source >= 0).nonzero(as_tuple=True)
    return states.index_put((row, spliced.source[row, place]), predicted[row, place])


def run(head: FlashHead, reading: Reading, features: Tensor) -> tuple[PromptRows, Tensor]:
    """Run the head on whole sequences with features [B, L, d]; return its rows and its states [B, M, d]."""
    made = head.read_prompts(reading.prompts(features))
    return made, head(made.rows, torch.arange(made.rows.shape[1], device=made.rows.device)[None])
