"""Warping: from logits to the distribution that is promised, once per forward.

The order is that of transformers: guidance, then processors that look at the path, then
temperature, top-k, top-p, min-p. Target and drafter share this code, so p and q cannot disagree
about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from mmspec.decoding.distribution import Gaussian, Scores
from mmspec.decoding.draft import Draft
from mmspec.errors import InputError
from mmspec.validation import is_integer, require_number

NEG_INF = float("-inf")
# They remember the last token that they were called with, and drafts are not called in the order of tokens.
STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


@dataclass(frozen=True)
class Sampler:
    """Sampling settings: how logits become a distribution. The defaults are greedy decoding.

    Args:
        temperature: 0 is greedy decoding.
        top_k: keep the k likeliest tokens; None or 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        guidance_scale: s of classifier-free guidance, u + s (c - u); 1 is off.
        processors: one list of transformers logits processors per row, or none at all; each sees the
            token ids on the node's own path.

    Raises:
        InputError: a value outside its range, or a processor that looks at more than the path.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    guidance_scale: float = 1.0
    processors: Sequence[LogitsProcessorList] = ()

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0.0, 1e4, "0 (greedy) to 10000")
        if 0.0 < self.temperature < 1e-4:
            raise InputError("temperature", self.temperature, "0 (greedy), or at least 0.0001")
        if self.top_k is not None and (not is_integer(self.top_k) or self.top_k < 0):
            raise InputError("top_k", self.top_k, "a positive integer, or None or 0 to keep every token")
        if self.top_p is not None:
            require_number("top_p", self.top_p, 0.0, 1.0, "above 0, at most 1", open_below=True)
        if self.min_p is not None:
            require_number("min_p", self.min_p, 0.0, 1.0, "0 to 1")
        require_number("guidance_scale", self.guidance_scale, 0.0, 1e4, "0 to 10000; 1 is off")
        for processor in (item for row in self.processors for item in row):
            if isinstance(processor, STATEFUL_PROCESSORS):
                allowed = "processors of a token's own path; this one keeps a state from call to call"
                raise InputError("logits_processor", type(processor).__name__, allowed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def __call__(self, logits: Tensor, draft: Draft, history: Sequence[Sequence[int]]) -> Scores:
        """Warp a target's logits.

        Args:
            logits: [B, n, V], or [2B, n, V] under guidance: conditional rows, then unconditional ones.
            draft: the scored nodes; they give processors their paths.
            history: B lists of committed token ids, prompt and root included.
        """
        logits = self.guided(logits)
        if self.processors:
            logits = process_paths(logits, draft, history, self.processors)
        return self.warped(logits.view(*draft.valid.shape, logits.shape[-1]))

    def guided(self, logits: Tensor) -> Tensor:
        """Apply guidance to logits as the model gave them, [B or 2B, n, V] -> [B, n, V]."""
        # softmax and ratios in float32 whatever the model's dtype, or ties decide
        logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        return guide(logits, self.guidance_scale)

    def warped(self, logits: Tensor) -> Scores:
        """Apply temperature and truncation to guided logits [B, n, V]."""
        return Scores(logits if self.greedy else self.truncate(logits / self.temperature), self.greedy)

    def truncate(self, logits: Tensor) -> Tensor:
        """Exclude tokens by top-k, then top-p, then min-p. logits: [..., V], already at temperature."""
        vocabulary = logits.shape[-1]
        if self.top_k and self.top_k < vocabulary:
            threshold = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < threshold, NEG_INF)
        if self.top_p is not None and self.top_p < 1.0:
            ordered, order = logits.sort(dim=-1, descending=False)
            # Ascending, as in transformers: drop the tail whose mass is at most 1 - top_p, never the last.
            drop = ordered.softmax(-1).cumsum(-1) <= 1.0 - self.top_p
            drop[..., -1] = False
            logits = logits.masked_fill(drop.scatter(-1, order, drop), NEG_INF)
        if self.min_p:
            floor = logits.amax(-1, keepdim=True) + math.log(self.min_p)
            logits = logits.masked_fill(logits < floor, NEG_INF)
        return logits


@dataclass(frozen=True)
class GaussianSampler:
    """Sampling settings of continuous tokens with a Gaussian head.

    Args:
        temperature: factor of the standard deviations; 0 is the mean.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 1.0
    guidance_scale: ClassVar[float] = 1.0
    processors: ClassVar[tuple[LogitsProcessorList, ...]] = ()

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0.0, 1e4, "0 (the mean) to 10000")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def __call__(self, parameters: Tensor, draft: Draft, history: Sequence[Sequence[int]]) -> Gaussian:
        """Make distributions of a head's parameters [B, n, 2 d]: mean and log standard deviation."""
        kept = parameters.to(torch.float64 if parameters.dtype == torch.float64 else torch.float32)
        mean, log_std = kept.chunk(2, -1)
        return Gaussian(mean, log_std.exp() * self.temperature)


def guide(logits: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance (Ho & Salimans, 2207.12598): [2B, n, V] -> [B, n, V], u + s (c - u)."""
    if scale == 1.0:
        return logits
    conditional, unconditional = logits.log_softmax(-1).chunk(2)
    guided = unconditional + scale * (conditional - unconditional)
    return guided.masked_fill(conditional == NEG_INF, NEG_INF)  # excluded by a grammar: -inf minus -inf


def process_paths(
    logits: Tensor,
    draft: Draft,
    history: Sequence[Sequence[int]],
    processors: Sequence[LogitsProcessorList],
) -> Tensor:
    """Apply processors to every node with the token ids of that node's own path.

    Penalties and grammars depend on the path, so each node is one call with one row; this costs
    one more read of the draft by the host, and only requests that ask for it pay.
    """
    tokens, ancestors = draft.tokens.tolist(), draft.ancestors.tolist()
    processed = torch.empty_like(logits)
    for row, committed in enumerate(history):
        for node, reached in enumerate(ancestors[row]):
            path = [tokens[row][j] for j in range(1, node + 1) if reached[j]]
            ids = torch.tensor([[*committed, *path]], device=logits.device)
            processed[row, node] = processors[row](
                cast(torch.LongTensor, ids), logits[row, node][None].clone()
            )[0]
    return processed
