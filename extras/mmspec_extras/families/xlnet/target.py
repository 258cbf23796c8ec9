"""Any-subset density models as targets, which fill the gaps of a text from left to right.

XLNet (1906.08237) learns the density of any places given any others, with two streams of attention. In the
order used here, the known places come first and the gaps follow from left to right, so that each gap is a
next token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from mmspec.core.draft import Tree
from mmspec.core.interfaces import PromptOutput, TargetOutput, TargetState
from mmspec.core.rows import named
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.targets.model_target import ModelTarget

XLNET_MASK = 6
KNOWN = -1  # rank of the places that the prompt gives


@dataclass
class Gaps(TargetState):
    """Texts of a batch, and their gaps.

    Attributes:
        tokens: [B, L + 1] with the mask token in open gaps; place L is unused.
        places: [B, M] places of the gaps, from left to right; L after the last.
        filled: [B] number of gaps whose tokens are committed.
        lengths: [B] lengths of the texts.
    """

    row_fields = named("tokens", "places", "filled", "lengths")

    tokens: Tensor
    places: Tensor
    filled: Tensor
    lengths: Tensor

    @property
    def ranks(self) -> Tensor:
        """[B, L + 1] order of all places: `KNOWN`, then the gaps from 0."""
        ranks = torch.full_like(self.tokens, KNOWN)
        order = torch.arange(self.places.shape[1], device=ranks.device).expand_as(self.places)
        return ranks.scatter(1, self.places, order)

    @property
    def count(self) -> Tensor:
        """[B] number of gaps."""
        return (self.places < self.tokens.shape[1] - 1).sum(-1)


class AnySubsetTarget(ModelTarget[Gaps]):
    """Adapter from an XLNet to the Target interface; the output is the tokens of the gaps and the end token.

    Nothing is cached: every forward pass reads the whole text.

    Args:
        model: a loaded XLNet with an LM head, in eval mode.

    Raises:
        InputError: the model has no end token.
    """

    prefix_cache = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.config: Any = None  # no head reads its states
        own = getattr(model.config, "mask_token_id", None)
        self.mask_token_id: int = XLNET_MASK if own is None else own  # marks a gap in prompts; 0 is valid
        self.end: Any = model.config.eos_token_id
        self.vocabulary: int = model.config.vocab_size
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.steps: Any = None
        if self.end is None:
            raise InputError("eos_token_id", None, "must be set: the output ends with this token")

    def compile(self) -> None:
        """Refuse to compile.

        Raises:
            InputError: always.
        """
        raise InputError(
            "compile", True, "is not available: forward passes over texts with gaps have any length"
        )

    def arrange(self, prompts: Sequence[Mapping[str, Tensor]]) -> Gaps:
        """Find the gaps of prompts.

        Raises:
            InputError: a prompt has no gap.
        """
        rows = [prompt["input_ids"][0].to(self.device) for prompt in prompts]
        found = [(row == self.mask_token_id).nonzero()[:, 0] for row in rows]
        if not all(map(len, found)):
            rule = f"must be a text with gaps, each marked by the mask token ({self.mask_token_id})"
            raise InputError("prompt", "no gap", rule)
        tokens = pad_sequence(rows, batch_first=True, padding_value=self.mask_token_id)
        tokens = torch.nn.functional.pad(tokens, (0, 1), value=self.mask_token_id)
        places = pad_sequence(found, batch_first=True, padding_value=tokens.shape[1] - 1)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        return Gaps(tokens, places, torch.zeros_like(lengths), lengths)

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[Gaps, PromptOutput]:
        """Read the texts, and return the state and the logits [B, 1, V] of the first gap."""
        if taps:
            raise InputError("taps", tuple(taps), "must be empty: heads cannot read states of two streams")
        state = self.arrange(prompts)
        first = torch.zeros_like(state.filled)[:, None]
        return state, PromptOutput(self.predict(state, state.tokens, state.ranks, first))

    def predict(self, state: Gaps, tokens: Tensor, ranks: Tensor, gaps: Tensor) -> Tensor:
        """Return the logits of gaps, each given all places of lower rank.

        Args:
            state: state of the texts.
            tokens, ranks: [B, L + 1] token and rank of each place.
            gaps: [B, n] numbers of gaps; a number after the last gap is the end token.

        Returns:
            [B, n, V].
        """
        inside = torch.arange(tokens.shape[1] - 1, device=tokens.device) < state.lengths[:, None]
        ranks, tokens = ranks[:, :-1], tokens[:, :-1]
        sees = (ranks[:, None] < ranks[:, :, None]) | (ranks[:, None] == KNOWN)
        over = gaps >= state.count[:, None]
        at = state.places.gather(1, gaps.clamp_max(state.places.shape[1] - 1))
        at = at.where(~over, tokens.shape[1])  # no place: queries at one place would be summed
        mapping = torch.nn.functional.one_hot(at, tokens.shape[1] + 1)[..., :-1]
        hidden = ~(sees & inside[:, None])
        logits: Tensor = self.model(
            tokens, perm_mask=hidden.to(self.dtype), target_mapping=mapping.to(self.dtype), use_mems=False
        ).logits.float()
        logits[..., self.mask_token_id] = float("-inf")
        ends = torch.full_like(logits, float("-inf"))
        ends[..., self.end] = 0.0
        return torch.where(over[..., None], ends, logits)

    def score(self, state: Gaps, draft: Tree) -> TargetOutput:
        """Score the gap after each node of a chain."""
        if not draft.is_chain:
            raise InputError("accelerator", "a tree", "must draft chains: gaps are filled in one order")
        gaps = state.filled[:, None] + torch.arange(draft.tokens.shape[1], device=self.device)
        tokens = self.filled(state, draft.tokens, gaps)
        return TargetOutput(self.predict(state, tokens, state.ranks, gaps + 1))

    def filled(self, state: Gaps, values: Tensor, gaps: Tensor) -> Tensor:
        """Return the tokens [B, L + 1] of the texts with `values` [B, n] in `gaps` [B, n]."""
        width = state.places.shape[1]
        places = state.places.gather(1, gaps.clamp_max(width - 1))
        places = places.where(gaps < width, state.tokens.shape[1] - 1)
        return state.tokens.scatter(1, places, values)

    def commit(self, state: Gaps, draft: Tree, verdict: Path, active: Tensor) -> None:
        """Keep the root and the accepted candidates of active rows."""
        steps = torch.arange(draft.tokens.shape[1], device=self.device)
        gaps = state.filled[:, None] + steps
        kept = (steps <= verdict.accepted[:, None]) & active[:, None]
        state.tokens = self.filled(state, draft.tokens, gaps.where(kept, state.places.shape[1]))
        state.filled = state.filled + kept.sum(-1)
