"""ViSkip (2603.14989): rests a drafter where the target attends to its images.

The signal is the attention of the newest token that the target has scored, in one layer: its query is
computed again from the hidden state that entered the layer, and compared with the cached keys. The decision
precedes all draws of the round, so that no acceptance rule is biased.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import Nodes, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AnyTarget, TargetOutput
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.methods.draft_model.drafter import DraftModelDrafter, visual_places
from mmspec.models.replaced import replaced_attention
from mmspec.open_types import AnyFunction
from mmspec.targets import CausalTarget
from mmspec.targets.attention import attends_plainly
from mmspec.validation import is_integer, require_number
from mmspec_extras.draft_models import RestingSession, TextModelDrafter

FULL = "full_attention"


def attention_of_newest(target: CausalTarget, state: Any, layer: int, hidden: Tensor) -> Tensor:
    """[B, T] attention of the newest cached token of each row to all cached ones; the mean of the heads.

    Args:
        target: a decoder whose attention is plain.
        state: of R >= B rows, between rounds.
        layer: index of the layer.
        hidden: [B, d] that entered the layer at that token.
    """
    queries: list[Tensor] = []

    def keeping(own: AnyFunction) -> AnyFunction:
        def attention(module: object, query: Tensor, *args: Any, **given: Any) -> object:
            queries.append(query)
            return torch.zeros_like(query.transpose(1, 2)), None

        return attention

    decoder: Any = target.model.get_decoder()
    block, rows = decoder.layers[layer], len(hidden)
    here = torch.zeros(state.cache.rows, 1, dtype=torch.long, device=hidden.device)
    # the position before that of the next token
    positions = target.next_positions(state, Nodes(here, here, here - 1, here[..., None] == 0, 0))
    turn = decoder.rotary_emb(hidden[:, None], positions[..., :rows, :])
    with replaced_attention(keeping):
        block.self_attn(block.input_layernorm(hidden[:, None]), position_embeddings=turn, attention_mask=None)
    (query,) = queries  # [B, heads, 1, size]
    lengths = state.cache.lengths[:rows]
    keys = state.cache.layers[layer].keys[:rows, : int(lengths.max())].permute(0, 2, 3, 1)
    scores = query @ keys.repeat_interleave(query.shape[1] // keys.shape[1], 1) * block.self_attn.scaling
    unseen = torch.arange(keys.shape[-1], device=lengths.device) >= lengths[:, None]
    paid: Tensor = scores.float().masked_fill(unseen[:, None, None], -torch.inf).softmax(-1)
    return paid.mean((1, 2))


class VisualSkipSession(RestingSession):
    """Drafts where the target hardly attends to its images.

    Attributes:
        images: places of each row's visual tokens.
        mass: [B] share of the newest scored token's attention that visual tokens have.
    """

    row_fields = named("images", "mass")

    drafter: VisualSkipDrafter

    def __init__(self, drafter: DraftModelDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        config, logits = self.drafter.target.config, batch.prefill.logits
        self.images = [visual_places(config, each.inputs).to(logits.device) for each in batch.requests]
        self.mass = logits.new_zeros(len(self.images), dtype=torch.float32)
        ends = batch.prefill.taps[self.drafter.layer][: len(self.images)]
        self._ends: Tensor | None = torch.cat([hidden[:, -1] for hidden in ends])

    def attach(self, state: Any) -> None:
        super().attach(state)
        self.target_state = state
        if self._ends is not None:
            self._look(self._ends)
            self._ends = None

    def resting(self) -> Tensor:
        rests: Tensor = self.mass >= self.drafter.threshold
        return rests

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        super().observe(draft, output, scores, verdict)
        hidden = output.taps[self.drafter.layer][: len(self.images)]  # without the copy under guidance
        self._look(take(hidden, verdict.last))

    def _look(self, hidden: Tensor) -> None:
        """Compute the masses from the states [B, d] that entered the layer at the newest scored tokens."""
        paid = attention_of_newest(self.drafter.target, self.target_state, self.drafter.layer, hidden)
        masses = [weights[places].sum() for weights, places in zip(paid, self.images, strict=True)]
        self.mass = torch.stack(masses)


class VisualSkipDrafter(TextModelDrafter):
    """Drafts a chain with a smaller model, and nothing for rows whose target attends to its images.

    Args:
        model: the draft model.
        num_draft_tokens: length of a draft.
        threshold: share of the attention to visual tokens from which it rests, 0 to 1.
        layer: of the target whose attention is read; the one in the middle of those with full attention if
            None.

    Raises:
        InputError: a value is out of range.
    """

    session = VisualSkipSession
    target: CausalTarget
    layer: int

    def __init__(
        self, model: Any, num_draft_tokens: int = 5, threshold: float = 0.35, layer: int | None = None
    ) -> None:
        require_number("threshold", threshold, 0.0, 1.0, "must be a share of attention from 0 to 1")
        super().__init__(model, num_draft_tokens, "coupled")
        self.threshold, self.chosen = threshold, layer

    def fit(self, target: AnyTarget) -> Any:
        refusal = InputError("accelerator", "viskip", "needs a causal decoder with ordinary sdpa attention")
        if not isinstance(target, CausalTarget):
            raise refusal
        decoder: Any = target.model.get_decoder()
        if not attends_plainly(decoder) or decoder.config._attn_implementation != "sdpa":
            raise refusal
        kinds = getattr(decoder.config, "layer_types", None) or [FULL] * len(decoder.layers)
        full = [index for index, kind in enumerate(kinds) if kind == FULL]
        layer = full[len(full) // 2] if self.chosen is None else self.chosen
        if not is_integer(layer) or layer not in full:
            raise InputError("layer", layer, f"must be a layer with full attention, one of {full}")
        fitted: Any = copy.copy(super().fit(target))
        fitted.target, fitted.layer, fitted.taps = target, layer, (layer,)
        return fitted
