"""What an EAGLE head learns: its target's hidden states, and what the target would say of them.

The target runs along, frozen; nothing is stored (vlm-drafting.md, section 4.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mmspec.models.eagle import EagleHead
from mmspec.models.feature_head import EMBEDDINGS, HIDDEN
from mmspec.targets import CausalTarget
from mmspec.training.drafter_data import DrafterBatch, Example

__all__ = ["EagleLoss"]

STATE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1  # EAGLE-1 and LANTERN alike
NOISE = 0.2  # width of the uniform noise on states, so that the head bears its own guesses
NOISE_LENGTH = 512  # EAGLE scales it by this over the length; short sequences would drown in that


class EagleLoss(nn.Module):
    """Smooth L1 between foretold and true hidden states, and soft cross entropy between what both mean.

    Args:
        head: learns.
        target: does not; its embeddings and output matrix are used as they are.
    """

    def __init__(self, head: EagleHead, target: CausalTarget) -> None:
        super().__init__()
        self.head = head
        self.target = target  # no module: neither trained nor saved

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: its two parts, and how often the likeliest tokens agree."""
        embeddings, states, positions, weights = self.read(batch.examples)
        generator = torch.Generator(states.device).manual_seed(batch.seed)
        noise = torch.rand(states.shape, generator=generator, device=states.device) - 0.5
        noisy = states + noise.to(states.dtype) * (NOISE * min(1.0, NOISE_LENGTH / states.shape[1]))
        # row t: token t and the state at t - 1 give the state at t, which says what token t + 1 is
        rows = self.head.fuse(embeddings[:, 1:-1], noisy[:, :-2])
        foretold = self.head(rows, positions[..., 1:-1])
        true, weights = states[:, 1:-1], weights[:, 2:]
        total = weights.sum().clamp_min(1.0)
        distance = F.smooth_l1_loss(foretold, true, reduction="none").mean(-1)
        law = self.target.head(true).float().softmax(-1)
        guess = self.target.head(foretold).float().log_softmax(-1)
        nats = -(law * guess).sum(-1)
        state_loss, token_loss = (distance * weights).sum() / total, (nats * weights).sum() / total
        agreement = ((law.argmax(-1) == guess.argmax(-1)) * weights).sum() / total
        loss = STATE_WEIGHT * state_loss + TOKEN_WEIGHT * token_loss
        return loss, {"states": state_loss, "tokens": token_loss, "agreement": agreement}

    @torch.no_grad()
    def read(self, examples: tuple[Example, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the target makes of the sequences, each read alone and never padded, as in decoding.

        Returns:
            Embeddings and final states [B, L, d], positions [B, L] (or [3, B, L]), and weights [B, L]: 1 at
            tokens of the answer. Padding is on the right, where causal attention never looks.
        """
        embeddings, states, positions, weights = [], [], [], []
        for example in examples:
            length = example.inputs["input_ids"].shape[1]
            _, output = self.target.prefill([example.inputs], length, (EMBEDDINGS, HIDDEN))
            embeddings.append(output.taps[EMBEDDINGS][0][0])
            states.append(output.taps[HIDDEN][0][0])
            places, _ = self.target.positions(example.inputs)
            positions.append(places.transpose(0, -1))  # [L, 1], or [L, 1, 3]
            weights.append((torch.arange(length, device=places.device) >= example.answer).float())
        padded = pad_sequence(positions, batch_first=True)[:, :, 0]
        return (
            pad_sequence(embeddings, batch_first=True),
            pad_sequence(states, batch_first=True),
            padded if padded.dim() == 2 else padded.permute(2, 0, 1),
            pad_sequence(weights, batch_first=True),
        )
