"""DFlash and DSpark: a block of noise is denoised in one pass over the target's hidden states.

DFlash (2602.06036) predicts every slot by itself; DSpark (2607.05147) takes the tokens from left to right,
and each slot is told of the token before it. The likeliest tokens are proposed, as a chain or as a tree, and
judged exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.decoding.cache import RaggedCache
from mmspec.decoding.canvas import Canvas
from mmspec.decoding.distribution import Scores
from mmspec.decoding.draft import Draft, Nodes, Tree
from mmspec.decoding.indexing import pick
from mmspec.decoding.interfaces import TargetOutput
from mmspec.decoding.rows import named
from mmspec.decoding.verdict import Path
from mmspec.drafters.heads import HeadDrafter, HeadSession
from mmspec.drafters.session import PromptBatch
from mmspec.drafters.tree import TreeGrowth, TreeShape
from mmspec.errors import InputError
from mmspec.models.dflash import DFlashHead
from mmspec.targets.causal import CacheState
from mmspec.validation import require_number

__all__ = ["DFlashDrafter", "DSparkDrafter"]


class BlockSession(HeadSession):
    """A head at work on one batch, with a cache of its own: a row for every committed token but the newest.

    Attributes:
        context: [R, c, d] rows of tokens that were committed since the head last read; R = B, or 2B under
            guidance.
        fresh: [B] how many of them there are; later ones are padding.
        has_read: whether the head has read them.
    """

    row_fields = named("state", "context", "fresh")

    head: DFlashHead
    drafter: DFlashDrafter

    def __init__(self, drafter: DFlashDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        head, device = self.head, self.target.device
        self.additive = head.dtype if device.type == "cpu" else None
        taps = [batch.prefill.taps[tap] for tap in head.taps]
        known = [head.join(states) for states in zip(*taps, strict=True)]
        lengths = [rows.shape[1] for rows in known]
        capacity = max(lengths) + 2 * head.config.block
        cache = RaggedCache(head.layers_config, len(known), capacity, device)
        for row, rows in enumerate(known):
            cache.begin_prefill(row, rows.shape[1])
            head(rows[:, :0], rows, torch.arange(rows.shape[1], device=device)[None], cache=cache)
        offset = torch.zeros(len(known), dtype=torch.long, device=device)
        # the newest token counts, as its row follows
        self.state = CacheState(cache, offset, [length + 1 for length in lengths])
        self.context = torch.cat([rows[:, :0] for rows in known])
        self.fresh = torch.zeros(len(batch.requests), dtype=torch.long, device=device)
        self.has_read = False

    def propose(self, canvas: Canvas) -> Draft:
        self.passes += 1
        first = 0 if self.head.config.anchor_predicts else 1
        hidden = self._denoise(canvas)[:, first:]  # [R, D, d]
        logits = self.head.logits(hidden, self.target.head)
        growth = TreeGrowth(self.shape, canvas.root, self.head.draft_tokens)
        state: Tensor | None = None
        while True:
            before, level = self._copied(growth.tokens), growth.level
            width = before.shape[1]
            slot = hidden[:, level, None].expand(-1, width, -1)
            said = logits[:, level, None].expand(-1, width, -1)
            bias, state = self.head.told(level, before, slot, state, self.target.embed)
            said = said + bias
            log_p = self._log_probabilities(self._guided(said))
            parent = growth.grow(self._cut(log_p, slot, before))
            if growth.is_grown:
                return growth.draft()
            if state is not None:
                state = pick(state, self._copied(parent))

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        path = self._copied(verdict.nodes)
        rows = self.head.join([pick(output.taps[tap], path) for tap in self.head.taps])
        count = verdict.accepted + 1  # the root, and what was accepted after it
        if self.has_read:
            self.context, self.fresh, self.has_read = rows, count, False
            return
        places = self._copied(self.fresh)[:, None] + torch.arange(rows.shape[1], device=rows.device)
        longer = pad(self.context, (0, 0, 0, rows.shape[1]))
        self.context = longer.scatter(1, places[..., None].expand_as(rows), rows)
        self.fresh = self.fresh + count

    def _denoise(self, canvas: Canvas) -> Tensor:
        """Read the rows that are new and denoise a block behind them: its states [R, n, d]."""
        self.has_read = True
        cache, fresh = self.state.cache, self._copied(self.fresh)
        block = self.head.slots(self._copied(canvas.root), self.target.embed)
        new, count = self.context.shape[1], block.shape[1]
        slot = torch.arange(new + count, device=fresh.device).expand(len(fresh), -1)
        is_block = slot >= new
        depths = torch.where(is_block, fresh[:, None] + slot - new, slot)
        seen = is_block | (slot < fresh[:, None])
        tokens = self._copied(canvas.root)[:, None].expand(-1, count)
        cache.begin_score(slot, new + count)
        masks = {}
        for causal in {causal for _, causal in self.head.config.layers}:
            visible = seen[:, None].expand(-1, count, -1)
            if causal:
                visible = visible & (depths[:, None] <= depths[:, new:, None])
            nodes = Nodes(tokens, slot[:, new:], depths, visible, new + count - 1)
            made = cache.attention_mask(nodes, self.additive)
            masks[causal] = made if isinstance(made, dict) else dict.fromkeys(cache.layer_types, made)
        mask = [masks[causal][kind] for kind, causal in self.head.config.layers]
        hidden: Tensor = self.head(block, self.context, cache.lengths[:, None] + depths, mask, cache)
        cache.commit(None, fresh)
        cache.longest += new
        self.state.tighten(canvas.length_bounds)
        return hidden

    def _cut(self, log_p: Tensor, slot: Tensor, before: Tensor) -> Tensor:
        """Exclude what follows tokens whose slot is unlikely to be accepted."""
        if not self.drafter.least_confidence:
            return log_p
        confidence = self.head.confidences(slot, before)[: len(log_p)].sigmoid()
        return log_p.masked_fill((confidence < self.drafter.least_confidence)[..., None], -torch.inf)


class DFlashDrafter(HeadDrafter):
    """The likeliest tokens of a block that a head denoises in one pass.

    Args:
        model: the trained head.
        num_draft_tokens, depth, top_k: of the tree, as of `HeadDrafter`; by default a chain of all that a
            pass predicts, which is also the deepest that there can be.
        least_confidence: a draft goes on no further where the head's confidence is below; 0 never asks it.

    Raises:
        InputError: a value outside its range, or a head without confidence.
    """

    title = "a DFlash head"
    session = BlockSession
    model: DFlashHead

    def __init__(
        self,
        model: DFlashHead,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        least_confidence: float = 0.0,
    ) -> None:
        super().__init__(model, num_draft_tokens, depth, top_k)
        require_number("least_confidence", least_confidence, 0.0, 1.0, "a probability")
        if least_confidence and model.confidence_head is None:
            raise InputError("least_confidence", least_confidence, "0: this head has no confidence")
        self.least_confidence = least_confidence

    def _choose_tree(self, **asked: Any) -> TreeShape:
        shape, most = super()._choose_tree(**asked), self.model.config.depth
        if shape.depth > most:
            raise InputError("depth", shape.depth, f"at most {most}, the tokens that a pass predicts")
        return shape


class DSparkDrafter(DFlashDrafter):
    """As DFlash, where each token knows the one before it.

    Args: as of `DFlashDrafter`.
    """

    title = "a DSpark head"
