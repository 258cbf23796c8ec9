"""Drafter of DFlash and DSpark: a block of noise is denoised in one pass over the target's hidden states.

DFlash (2602.06036) predicts every slot independently. DSpark (2607.05147) chooses the tokens from left to
right, and each slot depends on the token before it. The draft is a chain or a tree of the likeliest tokens or
of draws, verified exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mmspec.core.cache import RaggedCache
from mmspec.core.canvas import Canvas
from mmspec.core.chunked_prefill import ChunkedPrefill
from mmspec.core.draft import Draft, Nodes
from mmspec.core.graphs import has_graphs
from mmspec.core.indexing import pick, take
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.heads.drafter import NEWEST, CachingSession, HeadDrafter, padded
from mmspec.methods.dflash.head import DFlashHead
from mmspec.targets.causal import CacheState
from mmspec.targets.steps import StaticCaches
from mmspec.validation import require_number

__all__ = ["DFlashDrafter"]


class BlockSession(CachingSession):
    """A head that drafts for one batch, with its own cache: a row for each committed token but the last.

    Attributes:
        anchor: [R, d] the newest row of the context.
    """

    row_fields = named("anchor")

    head: DFlashHead
    drafter: DFlashDrafter

    def __init__(self, drafter: DFlashDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        device = self.target.device
        self.additive = self.head.dtype if device.type == "cpu" else None
        self.features = torch.cat(self._known(batch, slice(0)))
        self.anchor = torch.cat(self._known(batch, NEWEST))[:, 0]
        self.accepted = torch.full((len(batch.requests),), -1, device=device)

    def _read_prompts(self, batch: PromptBatch) -> ChunkedPrefill[None]:
        head, device, known = self.head, self.target.device, self._known(batch)
        lengths = [rows.shape[1] for rows in known]
        capacity = max(lengths) + 2 * head.config.block
        caches = self.drafter.compiled
        take = RaggedCache if caches is None else caches.take
        cache = take(head.layers_config, len(known), capacity, device)
        cache.plan.reads_all = caches is not None  # graphs have one width
        offsets, prompts = [0] * len(known), batch.prompts
        for group in self._groups(lengths):
            rows = padded([known[row] for row in group])
            places = torch.arange(rows.shape[1], device=device).expand(len(group), -1)
            if head.config.mrope_section is not None:
                places, beyond = self._positions([prompts[row] for row in group])
                for row, offset in zip(group, beyond, strict=True):
                    offsets[row] = offset
            for part in self._parts(group, [lengths[row] for row in group], cache):
                yield self._weigh(len(group) * (part.stop - part.start), cache)
                head(rows[:, :0], rows[:, part], places[..., part], cache=cache)
        # the newest token counts too, as its row follows
        lengths = [length + 1 for length in lengths]
        self.state = CacheState(cache, torch.tensor(offsets, device=device), lengths)
        if caches is not None:
            caches.lend(cache, self.state)

    def propose(self, canvas: Canvas) -> Draft:
        self.prepare()
        self.passes += 1
        first = 0 if self.head.config.anchor_predicts else 1
        hidden = self._denoise(canvas)[:, first:]  # [R, D, d]
        logits = self.head.logits(hidden, self.read_out)
        lattice = None
        if self.head.has_candidates:  # under guidance, both prompts have the same candidates
            ranked = logits if self.copies == 1 else self._copied(self._guided(logits))
            lattice = self.head.lattice(hidden, logits, self.anchor, self.target.embed, ranked)
        growth = self.growth(canvas)
        state: Tensor | None = None
        while True:
            before, level = self._copied(growth.tokens), growth.level
            width = before.shape[1]
            slot = hidden[:, level, None].expand(-1, width, -1)
            if lattice is None:
                bias, state = self.head.told(level, before, slot, state, self.target.embed)
                guided = self._guided(logits[:, level, None].expand(-1, width, -1) + bias)
            else:
                scores = self._guided(self.head.scores(lattice, level, before, slot))
                guided = lattice.spread(level, scores, logits.shape[-1])
            log_p, trust = self._log_probabilities(guided), None
            if self.head.confidence_head is not None:
                confidence = self.head.confidences(slot, before)[: len(log_p)].float()
                if least := self.drafter.least_confidence:
                    log_p = log_p.masked_fill((confidence.sigmoid() < least)[..., None], -torch.inf)
                trust = logsigmoid(confidence)
            parent = growth.grow(log_p, trust)
            if growth.is_grown:
                return self.rated(growth)
            if state is not None:
                state = pick(state, self._copied(parent))

    def _denoise(self, canvas: Canvas) -> Tensor:
        """Read the new rows and denoise a block after them; return its states [R, n, d]."""
        cache, accepted = self.state.cache, self._copied(self.accepted)
        block = self.head.slots(self._copied(canvas.root), self.target.embed)
        new, count = self.features.shape[1], block.shape[1]
        slot = torch.arange(new + count, device=accepted.device).expand(len(accepted), -1)
        is_block = slot >= new
        depths = torch.where(is_block, accepted[:, None] + slot - (new - 1), slot)
        seen = is_block | (slot <= accepted[:, None])
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
        positions = (cache.lengths + self.state.offset)[:, None] + depths
        hidden: Tensor = self.head(block, self.features, positions, mask, cache)
        if new:
            newest = take(self.features, accepted.clamp_min(0))
            self.anchor = newest.where((accepted >= 0)[:, None], self.anchor)
        self._keep(accepted, new)
        return hidden


class DFlashDrafter(HeadDrafter):
    """Drafts the likeliest tokens of a block that a head denoises in one forward pass.

    Args:
        model: the trained head.
        num_draft_tokens, depth: see `HeadDrafter`; tokens of the head's block if None.
        top_k, tree: see `HeadDrafter`.
        sampling: see `HeadDrafter`. Image tokens need "coupled" or "sampled", because the target seldom draws
            their likeliest tokens.
        least_confidence: a draft ends where the head's confidence is below this, 0 to 1. The confidence also
            scales the probabilities by which the nodes of a tree are chosen.

    Raises:
        InputError: a value is out of range, or the head has no confidence.
    """

    session = BlockSession
    model: DFlashHead
    compiled: StaticCaches | None = None

    def __init__(
        self,
        model: DFlashHead,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        least_confidence: float = 0.0,
        tree: str | int | Sequence[int] = "dynamic",
        sampling: str = "greedy",
    ) -> None:
        super().__init__(model, num_draft_tokens, depth, top_k, tree, sampling)
        require_number("least_confidence", least_confidence, 0.0, 1.0, "must be a probability from 0 to 1")
        if least_confidence and model.confidence_head is None:
            raise InputError("least_confidence", least_confidence, "must be 0: this head has no confidence")
        self.least_confidence = least_confidence

    @property
    def deepest(self) -> tuple[int, str]:
        return self.model.config.depth, "the tokens of a block"

    def compile(self) -> None:
        if self.compiled is None and has_graphs(self.model.device):
            self.compiled = StaticCaches()
