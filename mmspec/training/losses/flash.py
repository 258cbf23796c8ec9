"""What a FLASH head learns: the K next hidden states, and the K next distributions, of a frozen target.

The target runs along; nothing is stored (vlm-drafting.md, section 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from mmspec.decoding.sampling import require_number
from mmspec.models.feature_head import EMBEDDINGS, HIDDEN, PromptRows
from mmspec.models.flash import FlashHead
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.teacher import Reading, learnt_pairs, read
from mmspec.visual_tokens.spans import ImageSpan, find_images

__all__ = ["FlashLoss", "flash_loss"]

# FLASH has 1.0 and 0.1, for tokens of a vocabulary of 32,000; acceptance follows the tokens
STATE_WEIGHT, TOKEN_WEIGHT = 1.0, 1.0
NOISE = 0.05


def flash_loss(
    head: FlashHead,
    read_out: Callable[[Tensor], Tensor],
    tokens: Tensor,
    embeddings: Tensor,
    states: Tensor,
    noise: Tensor,
    learnt: Tensor,
    lengths: Sequence[int],
    spans: Sequence[Sequence[ImageSpan]],
    discount: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Smooth L1 on hidden states and soft cross-entropy on tokens, averaged over the pairs that count.

    FLASH, 2505.12728, section 3.4. What the target says is constant: no gradient is to reach it.

    Args:
        head: in training mode.
        read_out: the target's output matrix, hidden states [..., d] -> logits [..., V].
        tokens: [B, L] prompts and answers, padded on the right.
        embeddings: [B, L, d] what entered the target's first layer.
        states: [B, L, d] its final hidden states, normed.
        noise: [B, L, d] added to the states that are read, against drafting on one's own guesses.
        learnt: [B, L] True at the tokens of answers.
        lengths: B.
        spans: B lists of images.
        discount: weight of offset i is discount^i.

    Returns:
        The loss, and figures: its two parts, and [K] how often the likeliest tokens agree at each offset.
    """
    block, device = head.config.block, tokens.device
    spliced, hidden = _run(head, embeddings, states + noise, learnt, lengths, spans)
    text = spliced.source.clamp_min(0)[..., None].expand(-1, -1, block)
    # nothing is drafted from what is no token of the vocabulary, such as the place of an image's label
    drafted_from = (spliced.source >= 0) & (tokens < head.config.vocabulary).gather(1, text[..., 0])
    counted = learnt_pairs(learnt, block).gather(1, text) & drafted_from[..., None]
    row, place = counted[..., 0].nonzero(as_tuple=True)  # offset 0 counts wherever another does
    counted = counted[row, place]  # [m, K]
    at = spliced.source[row, place][:, None] + torch.arange(block, device=device)
    row_at = row[:, None], at.clamp_max(tokens.shape[1] - 1)
    predicted, true = head.predict(hidden[row, place], block), states[row_at]  # [m, K, d]
    weights = counted * discount ** torch.arange(block, device=device)
    total = weights.sum().clamp_min(1.0)
    distance = smooth_l1_loss(predicted, true, reduction="none").mean(-1)
    distribution = read_out(true).float().softmax(-1)
    guess = (read_out(predicted) + head.bias(tokens[row_at])).float().log_softmax(-1)
    nats = -(distribution * guess).sum(-1)
    state_loss, token_loss = (distance * weights).sum() / total, (nats * weights).sum() / total
    agreement = ((distribution.argmax(-1) == guess.argmax(-1)) & counted).sum(0) / counted.sum(0).clamp_min(1)
    loss = STATE_WEIGHT * state_loss + TOKEN_WEIGHT * token_loss
    return loss, {"states": state_loss, "tokens": token_loss, "agreement": agreement}


class FlashLoss(nn.Module):
    """The loss of a FLASH head on sequences that its target reads.

    Args:
        head: learns.
        target: does not; its embeddings and output matrix are used as they are.
        own_guesses: share of the answers' states that the head reads as it predicts them itself, as it has
            to beyond its first block (and everywhere, where it drafts token by token). The paper has none.

    Raises:
        InputError: a share that is none.
    """

    def __init__(self, head: FlashHead, target: CausalTarget, *, own_guesses: float = 0.0) -> None:
        super().__init__()
        require_number("own_guesses", own_guesses, 0.0, 1.0, "a share, 0 to 1")
        self.head = head
        self.target = target  # no module: neither trained nor saved
        self.own_guesses = own_guesses

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: its two parts, and how often the likeliest tokens agree."""
        device = self.target.device
        reading = read(self.target, batch.examples, (EMBEDDINGS, HIDDEN))
        embeddings, states = reading.taps[EMBEDDINGS], reading.taps[HIDDEN]
        generator = torch.Generator(device).manual_seed(batch.seed)
        noise = (NOISE * (2 * torch.rand(states.shape, generator=generator, device=device) - 1)).to(states)
        spans = [find_images(self.target.config, example.inputs) for example in batch.examples]
        if self.own_guesses:
            drawn = torch.rand(states.shape[:2], generator=generator, device=device) < self.own_guesses
            guessed = own_states(self.head, reading, noise, spans)
            noise = noise.where(~(drawn & reading.learnt)[..., None], guessed - states)
        return flash_loss(
            self.head,
            self.target.head,
            reading.tokens,
            embeddings,
            states,
            noise,
            reading.learnt,
            reading.lengths,
            spans,
        )


@torch.no_grad()
def own_states(
    head: FlashHead, reading: Reading, noise: Tensor, spans: Sequence[Sequence[ImageSpan]]
) -> Tensor:
    """[B, L, d] states as the head predicts them from the token before; in images, the target's."""
    states = reading.taps[HIDDEN]
    spliced, hidden = _run(
        head, reading.taps[EMBEDDINGS], states + noise, reading.learnt, reading.lengths, spans
    )
    predicted = head.predict(hidden, 1)[..., 0, :].to(states)
    row, place = (spliced.source >= 0).nonzero(as_tuple=True)
    return states.index_put((row, spliced.source[row, place]), predicted[row, place])


def _run(
    head: FlashHead,
    embeddings: Tensor,
    states: Tensor,
    learnt: Tensor,
    lengths: Sequence[int],
    spans: Sequence[Sequence[ImageSpan]],
) -> tuple[PromptRows, Tensor]:
    """Whole sequences as the head reads them, and [B, L', d] what it makes of them."""
    questions = (learnt.long().argmax(-1) - 1).clamp_min(0)
    spliced = head.read_prompts(embeddings, states, lengths, spans, questions)
    return spliced, head(spliced.rows, torch.arange(spliced.rows.shape[1], device=states.device)[None])
