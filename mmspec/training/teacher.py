"""Hidden states of a frozen target on the sequences that its drafters learn from.

The target runs along; nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mmspec.models.feature_head import EMBEDDINGS, Prompts
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import TrainingExample
from mmspec.visual_tokens.spans import ImageSpan, find_images

__all__ = ["Reading", "learnt_pairs", "read"]


@dataclass(frozen=True)
class Reading:
    """A batch of sequences, padded on the right, where causal attention never looks.

    Attributes:
        tokens: [B, L] prompts and answers.
        lengths: B.
        learnt: [B, L] True at the tokens of answers.
        spans: B lists of images.
        taps: layer index -> [B, L, d] hidden states; see `TargetOutput.taps`.
    """

    tokens: Tensor
    lengths: list[int]
    learnt: Tensor
    spans: list[list[ImageSpan]]
    taps: dict[int, Tensor]

    def prompts(self, features: Tensor) -> Prompts:
        """The sequences as a head reads whole prompts, with its features [B, L, d] at the tokens."""
        questions = (self.learnt.long().argmax(-1) - 1).clamp_min(0)
        return Prompts(self.taps[EMBEDDINGS], features, self.lengths, self.spans, questions)


@torch.no_grad()
def read(target: CausalTarget, examples: Sequence[TrainingExample], taps: Sequence[int]) -> Reading:
    """Run the target over sequences, together where they can be batched (`CausalTarget.read`)."""
    ids = [example.inputs["input_ids"][0] for example in examples]
    return Reading(
        pad_sequence(ids, batch_first=True),
        [len(each) for each in ids],
        pad_sequence([example.learnt for example in examples], batch_first=True),
        [find_images(target.config, example.inputs) for example in examples],
        target.read([example.inputs for example in examples], taps),
    )


def learnt_pairs(learnt: Tensor, block: int) -> Tensor:
    """The pairs (row t, offset i) that are learnt: [B, L] learnt tokens -> [B, L, K].

    Offset i of row t predicts what follows token t + i. It counts if all of the tokens t + 1 ... t + i + 1
    are learnt ones, so that a block never reaches past its answer, into the next turn or into padding.
    """
    following = pad(learnt, (0, block)).unfold(1, block, 1)[:, 1 : learnt.shape[1] + 1]
    return following.long().cumprod(-1).bool()
