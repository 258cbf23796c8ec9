"""Drafters and sessions of heads that read a row for every token: EAGLE, FLASH, Hydra++.

This module reads rows, and grows trees with one forward pass of the head a level. A drafter of this kind adds
a session that drafts with its head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.cache import RaggedCache
from mmspec.core.canvas import Canvas
from mmspec.core.chunked_prefill import ChunkedPrefill
from mmspec.core.draft import Draft, DraftKind, Nodes, Tree
from mmspec.core.graphs import has_graphs
from mmspec.core.image_grid import Grammar, exclude
from mmspec.core.indexing import pick, take
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.heads.drafter import NEWEST, CachingSession, Committed, HeadDrafter, ordered, padded
from mmspec.heads.model import EMBEDDINGS, FeatureHead, Prompts
from mmspec.targets.attention import attends_by_kernel, attends_plainly, attention_on_tree, mask_dtype
from mmspec.targets.causal import CacheState
from mmspec.targets.steps import CapturedForward, CompiledForward
from mmspec.visual_tokens.spans import ImageSpan, find_images
from mmspec.visual_tokens.splice import PromptRows

__all__ = ["FeatureDrafter", "FeatureSession", "GrownTreeDrafter", "GrownTreeSession"]


class FeatureDrafter(HeadDrafter):
    """Drafts a tree of candidates with a head that reads a row for every token."""

    model: FeatureHead
    more_taps = (EMBEDDINGS,)
    compiled: CapturedForward | CompiledForward | None = None

    def compile(self) -> None:
        if self.compiled is None:
            head = self.model
            if has_graphs(head.device):
                self.compiled = CapturedForward(head, partial(read_nodes, head))
            else:
                self.compiled = CompiledForward(type(head).__name__, partial(read_nodes, head))


class FeatureSession(CachingSession):
    """A head that drafts for one batch, with its own cache: the prompts' rows, then a row for every token.

    Rows of committed tokens are made from the target's hidden states, rows of candidates from the head's own
    predictions. The latter are never committed, and are overwritten in the next round.

    Attributes:
        tokens: [B, D + 1] committed since the head last read; the newest, the root, is filled in when it is
            known.
        features: [R, D + 1, d] of the token before each; R = B, or 2B under guidance.
        accepted: [B] index of the root among them; later ones are padding.
        summary: [R, s] the head's summary of the prompts' images; None if there is none, or before they are
            read.
    """

    row_fields = named("tokens", "summary")

    head: FeatureHead

    def __init__(self, drafter: FeatureDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.steps = drafter.compiled
        self.additive = mask_dtype(self.head.decoder)
        self.plain = attends_plainly(self.head.decoder)
        last = torch.cat(self._known(batch, NEWEST))
        self.features = pad(last, (0, 0, 0, self.shape.depth))
        size = len(batch.requests), self.shape.depth + 1
        self.tokens = torch.zeros(size, dtype=torch.long, device=last.device)
        self.accepted = self.tokens[:, 0]
        self.summary: Tensor | None = None

    def _hold(self, committed: Committed) -> None:
        super()._hold(committed)
        self.tokens = committed.tokens.roll(-1, 1)

    def _lengthen(self, places: int) -> None:
        super()._lengthen(places)
        if (more := places - self.tokens.shape[1]) > 0:
            self.tokens = pad(self.tokens, (0, more))

    def _write(self, places: Tensor, tokens: Tensor, features: Tensor) -> None:
        super()._write(places, tokens, features)
        self.tokens = self.tokens.scatter(1, places - 1, tokens)  # features are of the token before

    def _read_prompts(self, batch: PromptBatch) -> ChunkedPrefill[None]:
        prompts, device = batch.prompts, self.target.device
        groups = self._groups([each.shape[1] for each in batch.prefill.taps[EMBEDDINGS]])
        read = [self._prompt_rows(batch, rows) for rows in groups]
        counts = ordered(groups, [made.lengths for made in read])
        lengths = [count + 1 for count in counts]  # with the newest token, whose row follows
        capacity = max(lengths) + 2 * self.shape.num_draft_tokens
        caches = self.steps.caches.take if isinstance(self.steps, CapturedForward) else RaggedCache
        cache = caches(self.head.decoder.config, len(prompts), capacity, device)
        cache.plan.reads_all = attends_by_kernel(self.head.decoder, self.plain, device)
        offsets = []
        for rows, made in zip(groups, read, strict=True):
            own = [prompts[row] for row in rows]
            positions = torch.arange(made.rows.shape[1], device=device).expand(len(rows), -1)
            beyond = [0] * len(rows)
            if (lag := self.head.position_lag) is not None:
                whole = [prompt["input_ids"].shape[1] for prompt in own]
                places, beyond = self._positions(own)
                if self.head.one_axis:
                    places = torch.arange(places.shape[-1], device=device).expand(len(rows), -1)
                    beyond = [0] * len(rows)
                index = (made.slot - lag).clamp_min(0)
                positions = places.gather(-1, index.expand(*places.shape[:-1], -1))
                counted = zip(beyond, whole, made.lengths, strict=True)
                beyond = [offset + length - count - lag for offset, length, count in counted]
            offsets.append(beyond)
            for part in self._parts(rows, made.lengths, cache):
                yield self._weigh(len(rows) * (part.stop - part.start), cache)
                mask = cache.chunk_mask(self.additive) if part.start else None
                self.head(made.rows[:, part], positions[..., part], mask, cache=cache)
        summaries = [made.summary for made in read if made.summary is not None]
        self.summary = torch.stack(ordered(groups, summaries)) if summaries else None
        self.state = CacheState(cache, torch.tensor(ordered(groups, offsets), device=device), lengths)
        if isinstance(self.steps, CapturedForward):
            self.steps.caches.lend(cache, self.state)

    def _prompt_rows(self, batch: PromptBatch, rows: Sequence[int]) -> PromptRows:
        """Return the rows [G, L, d] of some prompts of a batch."""
        prompts = [batch.prompts[row] for row in rows]
        taps = {tap: padded([states[row] for row in rows]) for tap, states in batch.prefill.taps.items()}
        features = self.head.join([taps[tap] for tap in self.head.taps])
        lengths = [prompt["input_ids"].shape[1] for prompt in prompts]
        spans = [find_images(self.target.config, prompt) for prompt in prompts]
        questions = torch.tensor(lengths, device=features.device) - 1
        embeddings = self._embedded(prompts, spans, taps[EMBEDDINGS])
        return self.head.read_prompts(Prompts(embeddings, features, lengths, spans, questions))

    def _embedded(
        self,
        prompts: Sequence[Mapping[str, Tensor]],
        spans: Sequence[Sequence[ImageSpan]],
        embeddings: Tensor,
    ) -> Tensor:
        """The head's inputs [G, L, d] for the tokens of prompts, given those of the target."""
        return embeddings

    def _read_committed(self, canvas: Canvas) -> Tensor:
        """Read the newly committed tokens, the root included; return the head's state there, [R, d]."""
        self.prepare()
        tokens = self.tokens.scatter(1, self.accepted[:, None], canvas.root[:, None])
        chain = Tree.chain(tokens, DraftKind.POINT)
        hidden = self._read(self.features, chain.nodes)
        accepted = self._copied(self.accepted)
        self._keep(accepted, tokens.shape[1])
        return take(hidden, accepted)

    def _read(self, features: Tensor, nodes: Nodes) -> Tensor:
        """Read nodes [B, n] after the last committed rows, with features [R, n, d] before each."""
        embeddings = self.head.embed(self._copied(nodes.tokens), self.target.embed)
        return self._read_rows(self.head.fuse(embeddings, features, self.summary), nodes)

    def _read_rows(self, rows: Tensor, nodes: Nodes) -> Tensor:
        """Read rows [R, n, w] of nodes [B, n]; return the head's state [R, n, d] at each."""
        self.passes += 1
        cache, nodes = self.state.cache, nodes.repeat_rows(self.copies)
        cache.begin_score(nodes.slots, nodes.extent)
        positions = (cache.lengths + self.state.offset)[:, None] + nodes.depth
        with attention_on_tree(self.head.decoder, self.plain, cache, nodes, self.additive) as mask:
            inputs = {"rows": rows, "positions": positions, "attention_mask": mask}
            step = partial(read_nodes, self.head) if self.steps is None else self.steps
            return step(inputs, cache)


def read_nodes(head: FeatureHead, inputs: Mapping[str, object], cache: RaggedCache) -> Tensor:
    """Run a head on new nodes, given rows, positions and mask; return its state [R, n, d] at them."""
    hidden: Tensor = head(inputs["rows"], inputs["positions"], inputs["attention_mask"], cache)
    return hidden


class GrownTreeSession(FeatureSession):
    """A head that grows a tree with one forward pass a level."""

    row_fields = named("grammar")

    def __init__(self, drafter: FeatureDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        layouts = [request.layout for request in batch.requests if request.layout is not None]
        forced = [layout.forced for layout in layouts]
        self.grammar = Grammar(forced, self.target.device) if layouts else None
        self.codes = layouts[0].codebook_size if layouts else 0

    def propose(self, canvas: Canvas) -> Draft:
        growth = self.growth(canvas)
        hidden = self._read_committed(canvas)[:, None]  # [R, w, d] at the nodes expanded last
        while True:
            parent = growth.grow(self._log_probabilities(self._logits(hidden, canvas.emitted + growth.level)))
            if growth.is_grown:
                return self.rated(growth)
            before = pick(hidden, self._copied(parent))
            hidden = self._read(before, growth.nodes(growth.tokens))

    def _logits(self, hidden: Tensor, index: Tensor) -> Tensor:
        """[B, w, V'] logits, from states [R, w, d], of the tokens at output index [B]."""
        logits = self._guided(self.head.logits(hidden, self.read_out))
        if self.grammar is None:
            return logits
        return exclude(logits, self.grammar.at(index[:, None]), self.codes, self.names)


class GrownTreeDrafter(FeatureDrafter):
    """Drafts a tree of continuations with a head that predicts hidden states.

    Args: see `HeadDrafter`.
    """

    session: Callable[..., GrownTreeSession] = GrownTreeSession
