"""EAGLE: a one-layer head on the target's hidden states grows a tree of candidates.

EAGLE-1 (Li et al., 2401.15077) with static trees, EAGLE-2 (2406.16858) with dynamic ones; for pictures as in
LANTERN (2410.03355, section 2.3 of visual-ar-decoding.md). One head serves both, and every target whose
hidden states can be tapped.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.decoding.cache import RaggedCache
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.image_grid import FREE, ImageGrid
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
from mmspec.decoding.sampling import NEG_INF, Sampler, Scores, guide
from mmspec.decoding.verdict import Verdict, take
from mmspec.drafters.growth import TreeGrowth, gather_rows
from mmspec.drafters.tree import NAMED_TREES, DynamicTree, StaticTree, TreeShape
from mmspec.errors import InputError
from mmspec.models.eagle import EagleConfig, EagleHead
from mmspec.registry import did_you_mean
from mmspec.targets.causal import CausalState, CausalTarget, to_device

EMBEDDINGS, HIDDEN = 0, -1  # taps: what enters the first layer, and what the target's head reads


class EagleDrafter(Drafter):
    """A tree of the likeliest continuations by a head that foretells the target's hidden states.

    Args:
        model: the trained head.
        num_draft_tokens: nodes of a dynamic tree, the root not counted; what the head's config says if None.
        depth: its deepest level; that of the config if None, but no more than there are nodes.
        top_k: nodes that it expands on each level, and children of each; likewise.
        tree: "dynamic"; or a static tree: "eagle", "wide", or the parents of its nodes, the root (0) first.

    Raises:
        InputError: a value outside its range, or sizes of a dynamic tree beside a static one.
    """

    kind = DraftKind.POINT
    taps = (EMBEDDINGS, HIDDEN)

    def __init__(
        self,
        model: EagleHead,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        tree: str | Sequence[int] = "dynamic",
    ) -> None:
        self.model = model
        self.shape = tree_shape(model.config, tree, num_draft_tokens, depth, top_k)
        self.max_nodes = self.shape.num_draft_tokens + 1
        self.branches = self.shape.max_children > 1
        self.target: CausalTarget | None = None

    def check(self, target: Target[Any]) -> None:
        """Raise an InputError unless the head was trained for a target of this kind and size."""
        config = self.model.config
        if not isinstance(target, CausalTarget):
            raise InputError("drafter", "an EAGLE head", "a target that is a transformers model")
        text = target.config.get_text_config(decoder=True)
        wanted = {
            "model type": (config.layer["model_type"], text.model_type),
            "hidden size": (config.hidden_size, text.hidden_size),
            "layers": (config.target_layers, text.num_hidden_layers),
            "vocabulary": (config.vocabulary, target.vocabulary),
        }
        for name, (trained, given) in wanted.items():
            if trained != given:
                allowed = f"a head that was trained for this target, whose {name} is {given}"
                raise InputError("drafter", f"a head for a target whose {name} is {trained}", allowed)
        if max(self.shape.branch(level) for level in range(1, self.shape.depth + 1)) > target.vocabulary:
            raise InputError("top_k", self.shape.max_children, f"at most {target.vocabulary}, the vocabulary")

    def fit(self, target: Target[Any]) -> EagleDrafter:
        """This drafter with the target's embedding and output matrix."""
        self.check(target)
        fitted = copy.copy(self)
        fitted.target = target  # type: ignore[assignment]  # checked
        return fitted

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        if self.target is None:
            raise InputError("drafter", "EagleDrafter", "one that was fitted: `drafter.fit(target)`")
        return EagleSession(self.model, self.target, self.shape, requests, prefill, sampler)


def tree_shape(
    config: EagleConfig,
    tree: str | Sequence[int],
    num_draft_tokens: int | None,
    depth: int | None,
    top_k: int | None,
) -> TreeShape:
    """The shape that `EagleDrafter`'s arguments ask for."""
    if tree == "dynamic":
        nodes = check_draft_tokens(config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens)
        return DynamicTree(
            nodes,
            min(config.depth, nodes) if depth is None else depth,
            min(config.top_k, nodes) if top_k is None else top_k,
        )
    for name, value in (("num_draft_tokens", num_draft_tokens), ("depth", depth), ("top_k", top_k)):
        if value is not None:
            raise InputError(name, value, f"nothing: it says how a dynamic tree grows, and tree is {tree!r}")
    if not isinstance(tree, str):
        return StaticTree(tree)
    if tree not in NAMED_TREES:
        raise InputError("tree", tree, did_you_mean(tree, ["dynamic", *NAMED_TREES]))
    return StaticTree.named(tree)


class EagleSession(DraftSession):
    """The head's own cache of one batch: a row for every token but the first of a sequence.

    Rows of committed tokens are made of the target's hidden states, rows of candidates of the head's own
    guesses. The latter are never committed, and overwritten in the next round.

    Attributes:
        tokens: [B, D + 1] committed in the last round; the newest, the root, is filled in when it is known.
        features: [R, D + 1, d] the target's hidden state before each; R = B, or 2B under guidance.
        accepted: [B] which of them the root is; later ones are padding.
    """

    def __init__(
        self,
        head: EagleHead,
        target: CausalTarget,
        shape: TreeShape,
        requests: Sequence[Request],
        prefill: PromptOutput,
        sampler: Sampler,
    ) -> None:
        self.head, self.target, self.shape, self.sampler = head, target, shape, sampler
        self.additive = head.dtype if head.decoder.config._attn_implementation == "eager" else None
        self.prompt_lengths = [request.inputs["input_ids"].shape[1] for request in requests]
        grids = [request.grid for request in requests if request.grid is not None]
        self.grammar = Grammar(grids, target.device) if grids else None
        prompts = list_prompts(requests, sampler)
        self.copies = len(prompts) // len(requests)
        self.state = self._read_prompts(prompts, prefill)
        last = torch.cat([hidden[:, -1:] for hidden in prefill.taps[HIDDEN]])
        self.features = pad(last, (0, 0, 0, shape.depth))
        self.tokens = torch.zeros(len(requests), shape.depth + 1, dtype=torch.long, device=last.device)
        self.accepted = self.tokens[:, 0]

    def propose(self, root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
        growth = TreeGrowth(self.shape, root)
        hidden = self._read_committed(root, history)[:, None]  # [R, w, d] at the nodes expanded last
        while True:
            parent = growth.grow(self._law(hidden, emitted + growth.level))
            if growth.is_grown:
                return growth.draft()
            before = gather_rows(hidden, self._copied(parent))
            reached = growth.ancestors[:, -growth.tokens.shape[1] :]
            hidden = self._read(growth.tokens, before, reached, growth.depths)

    def observe(self, draft: Draft, output: TargetOutput, scores: Scores, verdict: Verdict) -> None:
        self.tokens = draft.tokens.gather(1, verdict.path).roll(-1, 1)
        self.features = gather_rows(output.taps[HIDDEN], self._copied(verdict.path))
        self.accepted = verdict.accepted

    def _read_prompts(self, prompts: Sequence[Mapping[str, Tensor]], prefill: PromptOutput) -> CausalState:
        """The cache of the prompts, read one row at a time as the target reads them."""
        device = self.target.device
        lengths = [hidden.shape[1] for hidden in prefill.taps[HIDDEN]]
        capacity = max(lengths) + 2 * self.shape.num_draft_tokens
        cache = RaggedCache(self.head.config.layer_config(), len(prompts), capacity, device)
        offsets = []
        for row, prompt in enumerate(prompts):
            positions, offset = self.target.positions(to_device(prompt, device))
            offsets.append(offset + 1)  # the first row is that of the second token
            if lengths[row] > 1:
                cache.begin_prefill(row, lengths[row] - 1)
                embeddings, hidden = prefill.taps[EMBEDDINGS][row], prefill.taps[HIDDEN][row]
                self.head(embeddings[:, 1:], hidden[:, :-1], positions[..., 1:], past_key_values=cache)
        return CausalState(cache, torch.tensor(offsets, device=device), lengths)

    def _read_committed(self, root: Tensor, history: Sequence[Sequence[int]]) -> Tensor:
        """Read what the last round committed, the root included; what the head foretells there, [R, d]."""
        tokens = self.tokens.scatter(1, self.accepted[:, None], root[:, None])
        chain = Draft.chain(tokens, DraftKind.POINT)
        hidden = self._read(tokens, self.features, chain.ancestors, chain.depth)
        accepted = self._copied(self.accepted)
        self.state.cache.commit(None, accepted + 1)
        lengths = zip(history, self.prompt_lengths, strict=True)
        self.state.tighten([len(tokens) - length for tokens, length in lengths])
        return take(hidden, accepted)

    def _read(self, tokens: Tensor, features: Tensor, reached: Tensor, depths: Tensor) -> Tensor:
        """Read new nodes behind those that were read since the last commit.

        Args:
            tokens: [B, n]; features: [R, n, d] hidden states before them.
            reached: [B, n, m] which of the m nodes, these last, each of them sees.
            depths: [B, m] of all nodes, counted from the first token that is not committed.

        Returns:
            [R, n, d] the hidden states at them, as the head foretells them.
        """
        cache, nodes = self.state.cache, tokens.shape[1]
        cache.begin_score(nodes, depths.shape[1] - nodes)
        depths = self._copied(depths)
        hidden: Tensor = self.head(
            self.target.embed(self._copied(tokens)),
            features,
            (cache.lengths + self.state.offset)[:, None] + depths[:, -nodes:],
            cache.attention_mask(self._copied(reached), depths, self.additive),
            cache,
        )
        return hidden

    def _law(self, hidden: Tensor, index: Tensor) -> Tensor:
        """[B, w, V] log-probabilities of the tokens at output index [B], warped as the target's will be.

        Processors are left out: they look at paths, which costs more than their effect on a guess.
        """
        logits = guide(self.target.head(hidden).float(), self.sampler.guidance_scale)
        if self.grammar is not None:
            logits = self.grammar(logits, index)
        if not self.sampler.greedy:
            logits = self.sampler.truncate(logits / self.sampler.temperature)
        return logits.log_softmax(-1)

    def _copied(self, values: Tensor) -> Tensor:
        """Values [B, ...] for all rows that the target reads, [R, ...]."""
        return values if self.copies == 1 else values.repeat(self.copies, *[1] * (values.dim() - 1))


class Grammar:
    """What the layout of a picture allows at each place of the output.

    Args:
        grids: one for each row.
        device: where the logits are.
    """

    def __init__(self, grids: Sequence[ImageGrid], device: torch.device) -> None:
        self.codes = grids[0].codebook_size
        length = max(grid.length for grid in grids) + 1  # one place more stands for all beyond the picture
        rows = [[*grid.forced, *[FREE] * (length - grid.length)] for grid in grids]
        self.forced = torch.tensor(rows, device=device)

    def __call__(self, logits: Tensor, index: Tensor) -> Tensor:
        """Exclude what may not stand at output index [B] from the logits [B, w, V]."""
        forced = self.forced.gather(1, index[:, None].clamp(max=self.forced.shape[1] - 1))
        token = torch.arange(logits.shape[-1], device=logits.device)
        allowed = torch.where(forced == FREE, token < self.codes, token == forced)
        return logits.masked_fill(~allowed[:, None], NEG_INF)
