"""SpecVLM's elastic compressor: the question chooses how each image is compressed (2509.11815)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, rms_norm

from mmspec.compressors import build_compressor
from mmspec.compressors.interface import Compressor, check_tokens
from mmspec.errors import InputError
from mmspec.visual_tokens.tokens import VisualTokens

__all__ = ["Gate", "choose_branch"]

BRANCHES: Mapping[str, Mapping[str, object]] = {
    "similarity_pruning": {"tokens": 8},
    "pooling": {"tokens": 8},
    "convolution": {"tokens": 8},
    "resampler": {"tokens": 2},
    "none": {},
}


def choose_branch(logits: Tensor, training: bool) -> Tensor:
    """[P, branches] -> one-hot weights: the arg-max; in training a sample with the gradient of its softmax.

    Straight-through Gumbel-softmax (Jang et al., 1611.01144): the output is exactly one-hot.
    """
    if not training:
        return one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)
    noise = -torch.empty_like(logits).exponential_().log()
    soft = (logits + noise).softmax(-1)
    return one_hot(soft.argmax(-1), logits.shape[-1]).to(soft) + (soft - soft.detach())


class Gate(Compressor):
    """Several compressors, one of which is chosen for each image by its question.

    C is that of the largest branch, with padding for the others, so that shapes stay static. "none" is the
    branch of questions that need no image.

    Args:
        width: d, of the features.
        branches: compressor name -> options; by default the paper's four operators, and "none".

    Raises:
        InputError: there are no branches, or the number of tokens of one depends on the image.
    """

    def __init__(self, width: int, branches: Mapping[str, Mapping[str, object]] = BRANCHES) -> None:
        made = {name: build_compressor(name, width, **options) for name, options in branches.items()}
        sizes = [branch.tokens for branch in made.values() if branch.tokens is not None]
        if not made or len(sizes) < len(made) or "gate" in made:
            raise InputError("branches", list(branches), "must be compressors with a fixed number of tokens")
        super().__init__(width, check_tokens(max(sizes)))
        self.largest = max(sizes)
        self.branches = nn.ModuleDict(made)
        hidden = max(1, width // 4)
        self.score = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, len(made)))

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        weights = choose_branch(self.score(rms_norm(question, (self.width,))), self.training)
        made = [branch(images, question).padded(self.largest) for branch in self.branches.values()]
        rows, chosen = torch.arange(len(weights), device=weights.device), weights.argmax(-1)
        features, mask, boxes = (
            torch.stack(parts, 1)
            for parts in zip(*((each.features, each.mask, each.boxes) for each in made), strict=True)
        )
        mixed = (weights[:, :, None, None] * features).sum(1) if self.training else features[rows, chosen]
        return VisualTokens(mixed, mask[rows, chosen], boxes[rows, chosen])
