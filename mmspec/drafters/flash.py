"""FLASH: a head that reads compressed pictures and foretells a block of tokens in each pass.

FLASH (2505.12728) as vlm-drafting.md, section 2.3, completes it: grouped-query attention with a cache, one
transform for each offset of a block, a light bias from each token of a block to the next, and blocks that
branch into a tree. With `block=1` the same weights draft one token a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.compressors.spans import find_pictures
from mmspec.decoding.cache import RaggedCache
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import (
    Drafter,
    DraftSession,
    PromptOutput,
    Request,
    Target,
    TargetOutput,
    check_draft_tokens,
    list_prompts,
)
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler, Scores, guide, is_integer
from mmspec.decoding.verdict import Verdict, take
from mmspec.drafters.growth import TreeGrowth, gather_rows
from mmspec.drafters.tree import DynamicTree
from mmspec.errors import InputError
from mmspec.models.flash import FlashHead
from mmspec.targets.causal import CausalState, CausalTarget

__all__ = ["FlashDrafter"]

EMBEDDINGS, HIDDEN = 0, -1  # taps: what enters the first layer, and what the target's head reads
DEFAULT_DRAFT_TOKENS, DEFAULT_TOP_K = 16, 4


class FlashDrafter(Drafter):
    """A tree of the likeliest continuations by a head that foretells blocks of hidden states.

    Args:
        model: the trained head.
        num_draft_tokens: nodes of the tree, the root not counted; 16 if None, or as many as there can be.
        depth: its deepest level; as many as a block has, if None. Levels beyond a block cost a pass a block.
        top_k: nodes that it expands on each level, and children of each; 4 if None, or as many as there are
            nodes. 1 makes a chain.
        block: tokens in a pass, at most the K that the head was trained for, which is the default; 1 is
            autoregressive drafting.

    Raises:
        InputError: a value outside its range.
    """

    kind = DraftKind.POINT
    taps = (EMBEDDINGS, HIDDEN)

    def __init__(
        self,
        model: FlashHead,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        block: int | None = None,
    ) -> None:
        most = model.config.block
        if block is not None and (not is_integer(block) or not 1 <= block <= most):
            raise InputError("block", block, f"an integer from 1 to {most}, which the head was trained for")
        self.model = model
        self.block = most if block is None else block
        self.shape = tree_shape(num_draft_tokens, most if depth is None else depth, top_k, depth is None)
        self.max_nodes = self.shape.num_draft_tokens + 1
        self.branches = self.shape.max_children > 1
        self.target: CausalTarget | None = None

    def check(self, target: Target[Any]) -> None:
        """Raise an InputError unless the head was trained for a target of this kind and size."""
        config = self.model.config
        if not isinstance(target, CausalTarget):
            raise InputError("drafter", "a FLASH head", "a target that is a transformers model")
        text = target.config.get_text_config(decoder=True)
        wanted = {
            "model type": (config.target_type, text.model_type),
            "hidden size": (config.hidden_size, text.hidden_size),
            "layers": (config.target_layers, text.num_hidden_layers),
            "vocabulary": (config.vocabulary, target.vocabulary),
        }
        for name, (trained, given) in wanted.items():
            if trained != given:
                allowed = f"a head that was trained for this target, whose {name} is {given}"
                raise InputError("drafter", f"a head for a target whose {name} is {trained}", allowed)
        if self.shape.max_children > target.vocabulary:
            raise InputError("top_k", self.shape.max_children, f"at most {target.vocabulary}, the vocabulary")

    def fit(self, target: Target[Any]) -> FlashDrafter:
        """This drafter with the target's embedding and output matrix."""
        self.check(target)
        fitted = copy.copy(self)
        fitted.target = target  # type: ignore[assignment]  # checked
        return fitted

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        if self.target is None:
            raise InputError("drafter", "FlashDrafter", "one that was fitted: `drafter.fit(target)`")
        return FlashSession(self, self.target, requests, prefill, sampler)


def tree_shape(nodes: int | None, depth: int, top_k: int | None, may_shrink: bool) -> DynamicTree:
    """The tree that `FlashDrafter`'s arguments ask for; defaults give way to what was asked for.

    Args:
        nodes, depth, top_k: as in `FlashDrafter`.
        may_shrink: whether the depth is a default.
    """
    if nodes is not None:
        check_draft_tokens(nodes)
        depth = min(depth, nodes) if may_shrink else depth
    if top_k is None:
        top_k = DEFAULT_TOP_K if nodes is None else min(DEFAULT_TOP_K, nodes)
    if nodes is None:
        nodes = DEFAULT_DRAFT_TOKENS
        if all(
            is_integer(value) and value >= 1 for value in (depth, top_k)
        ):  # else the tree says what is wrong
            nodes = max(depth, top_k, min(nodes, top_k + (depth - 1) * top_k**2))
    return DynamicTree(nodes, depth, top_k)


class FlashSession(DraftSession):
    """The head's own cache of one batch: the prompt with compressed pictures, then a row for every token.

    Rows of committed tokens are made of the target's hidden states, rows of candidates of the head's own
    guesses. The latter are never committed, and overwritten in the next round. Positions are the cache's
    own: a row's position is the number of rows before it on its path.

    Attributes:
        tokens: [B, D + 1] committed in the last round; the newest, the root, is filled in when it is known.
        features: [R, D + 1, d] the target's hidden state before each; R = B, or 2B under guidance.
        accepted: [B] which of them the root is; later ones are padding.
    """

    def __init__(
        self,
        drafter: FlashDrafter,
        target: CausalTarget,
        requests: Sequence[Request],
        prefill: PromptOutput,
        sampler: Sampler,
    ) -> None:
        self.head, self.shape, self.block = drafter.model, drafter.shape, drafter.block
        self.target, self.sampler = target, sampler
        eager = self.head.decoder.config._attn_implementation == "eager"
        self.additive = self.head.dtype if eager else None
        self.prompt_lengths = [request.inputs["input_ids"].shape[1] for request in requests]
        prompts = list_prompts(requests, sampler)
        self.copies = len(prompts) // len(requests)
        self.state = self._read_prompts(prompts, prefill)
        last = torch.cat([hidden[:, -1:] for hidden in prefill.taps[HIDDEN]])
        self.features = pad(last, (0, 0, 0, self.shape.depth))
        self.tokens = torch.zeros(len(requests), self.shape.depth + 1, dtype=torch.long, device=last.device)
        self.accepted = self.tokens[:, 0]

    def propose(self, root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
        hidden = self._read_committed(root, history)[:, None]  # [R, w, d] of the nodes that a pass ended in
        return self._chain(root, hidden) if self.shape.max_children == 1 else self._tree(root, hidden)

    def _chain(self, root: Tensor, hidden: Tensor) -> Draft:
        """What `_tree` gives with one child a node, at a third of its operations."""
        tokens, sound, depth = [root], torch.ones_like(root, dtype=torch.bool), self.shape.depth
        steps = torch.arange(depth + 1, device=root.device)
        for start in range(0, depth, self.block):
            foretold = self.head.foretell(hidden[:, 0], min(self.block, depth - start))  # [R, K, d]
            for logits in self.target.head(foretold).unbind(1):
                likeliest = self._guided(logits[:, None], tokens[-1][:, None])[:, 0].max(-1)
                sound = sound & likeliest.values.isfinite()
                tokens.append(likeliest.indices)
            if start + self.block < depth:
                read, nodes = torch.stack(tokens[start + 1 :], 1), steps[: start + self.block]
                reached = (nodes <= nodes[start:, None]).expand(len(root), -1, -1)
                hidden = self._pass(read, foretold, reached, nodes.expand(len(root), -1))[:, -1:]
        valid = sound[:, None] | (steps == 0)
        return Draft.chain(torch.stack(tokens, 1), DraftKind.POINT, valid=valid, faulty=~sound)

    def _tree(self, root: Tensor, hidden: Tensor) -> Draft:
        """Grow a tree, with a pass of the head at the start of every block."""
        growth = TreeGrowth(self.shape, root)
        base = torch.zeros_like(root)[:, None]  # [B, w] which of these each expanded node descends from
        last_pass = (self.shape.depth - 1) // self.block * self.block  # the level that it starts from
        unread: list[tuple[Tensor, Tensor]] = []  # tokens of expanded nodes, and features before them
        while not growth.is_grown:
            offset = growth.level % self.block
            if offset == 0:
                if unread:
                    hidden = self._read_nodes(unread, growth)
                    base = torch.arange(hidden.shape[1], device=root.device).expand(len(root), -1)
                    unread = []
                ahead = min(self.block, self.shape.depth - growth.level)
                foretold = self.head.foretell(hidden, ahead)  # [R, w, K, d]
                logits = self.target.head(foretold)  # [R, w, K, V]
            law = self._law(gather_rows(logits[:, :, offset], self._copied(base)), growth.tokens)
            parent = growth.grow(law)
            base = base.gather(1, parent)
            if growth.level <= last_pass:
                before = gather_rows(foretold[:, :, offset], self._copied(base))
                unread.append((growth.tokens, before))
        return growth.draft()

    def observe(self, draft: Draft, output: TargetOutput, scores: Scores, verdict: Verdict) -> None:
        self.tokens = draft.tokens.gather(1, verdict.path).roll(-1, 1)
        self.features = gather_rows(output.taps[HIDDEN], self._copied(verdict.path))
        self.accepted = verdict.accepted

    def _read_prompts(self, prompts: Sequence[Mapping[str, Tensor]], prefill: PromptOutput) -> CausalState:
        """The cache of the prompts, compressed and read one row at a time."""
        device, layer = self.target.device, self.head.config.layer_config()
        read = []
        for prompt, embeddings, hidden in zip(
            prompts, prefill.taps[EMBEDDINGS], prefill.taps[HIDDEN], strict=True
        ):
            length = hidden.shape[1]
            spans = [find_pictures(self.target.config, prompt)]
            question = torch.tensor([length - 1], device=device)
            read.append(self.head.compress(embeddings, hidden, [length], spans, question).rows)
        lengths = [rows.shape[1] for rows in read]
        cache = RaggedCache(layer, len(prompts), max(lengths) + 2 * self.shape.num_draft_tokens, device)
        for row, rows in enumerate(read):
            cache.begin_prefill(row, lengths[row])
            self.head(rows, torch.arange(lengths[row], device=device)[None], past_key_values=cache)
        return CausalState(cache, torch.zeros(len(prompts), dtype=torch.long, device=device), lengths)

    def _read_committed(self, root: Tensor, history: Sequence[Sequence[int]]) -> Tensor:
        """Read what the last round committed, the root included; the head's state there, [R, d]."""
        tokens = self.tokens.scatter(1, self.accepted[:, None], root[:, None])
        chain = Draft.chain(tokens, DraftKind.POINT)
        hidden = self._pass(tokens, self.features, chain.ancestors, chain.depth)
        accepted = self._copied(self.accepted)
        self.state.cache.commit(None, accepted + 1)
        lengths = zip(history, self.prompt_lengths, strict=True)
        self.state.tighten([len(tokens) - length + 1 for tokens, length in lengths])
        return take(hidden, accepted)

    def _read_nodes(self, unread: Sequence[tuple[Tensor, Tensor]], growth: TreeGrowth) -> Tensor:
        """Read levels of expanded nodes in one pass; the head's state at the last of them, [R, w, d]."""
        tokens, features = (torch.cat(parts, 1) for parts in zip(*unread, strict=True))
        reached = growth.ancestors[:, -tokens.shape[1] :]
        return self._pass(tokens, features, reached, growth.depths)[:, -growth.tokens.shape[1] :]

    def _pass(self, tokens: Tensor, features: Tensor, reached: Tensor, depths: Tensor) -> Tensor:
        """Read new nodes behind those that were read since the last commit.

        Args:
            tokens: [B, n]; features: [R, n, d] hidden states before them.
            reached: [B, n, m] which of the m nodes, these last, each of them sees.
            depths: [B, m] of all nodes, counted from the first row that is not committed.
        """
        cache, nodes = self.state.cache, tokens.shape[1]
        cache.begin_score(nodes, depths.shape[1] - nodes)
        depths = self._copied(depths)
        rows = self.head.fuse(self.target.embed(self._copied(tokens)), features)
        hidden: Tensor = self.head(
            rows,
            cache.lengths[:, None] + depths[:, -nodes:],
            cache.attention_mask(self._copied(reached), depths, self.additive),
            cache,
        )
        return hidden

    def _law(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[B, w, V] log-probabilities after nodes [B, w], warped as the target's will be.

        Processors are left out: they look at paths, which costs more than their effect on a guess.
        """
        logits = self._guided(logits, tokens)
        if not self.sampler.greedy:
            logits = self.sampler.truncate(logits / self.sampler.temperature)
        return logits.log_softmax(-1)

    def _guided(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[B, w, V] logits after nodes [B, w]: the head's [R, w, V], and the bias of what stands before."""
        return guide((logits + self.head.bias(self._copied(tokens))).float(), self.sampler.guidance_scale)

    def _copied(self, values: Tensor) -> Tensor:
        """Values [B, ...] for all rows that the target reads, [R, ...]."""
        return values if self.copies == 1 else values.repeat(self.copies, *[1] * (values.dim() - 1))
