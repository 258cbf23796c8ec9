"""Draft model: a smaller model of the same tokenizer, with its own vision path or from text alone.

Speculative decoding as first published (Leviathan et al., 2211.17192; Chen et al., 2302.01318), and with
several candidates for a place (SpecTr, 2310.15141; MCSD, 2401.06706).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.distribution import Scores
from mmspec.decoding.draft import Draft, DraftKind, Nodes, Tree
from mmspec.decoding.interfaces import DraftSession, Target, TargetOutput
from mmspec.decoding.random_stream import Purpose
from mmspec.decoding.rows import named
from mmspec.decoding.verdict import Path
from mmspec.drafters.length import half_lengths
from mmspec.drafters.session import ModelDrafter, PromptBatch
from mmspec.drafters.siblings import SiblingDraws, kind_of
from mmspec.drafters.tree import StaticTree, TreeGrowth, constant, drawable, static_tree
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.targets import CausalTarget
from mmspec.targets.mixers import find_mixers
from mmspec.validation import check_draft_tokens

LENGTH = 5  # of a chain, where nothing is asked for


class DraftModelSession(DraftSession):
    """Draft model and its KV cache for one batch.

    Attributes:
        num_draft_tokens: length of the next chain.
        unread: rounds since the last chain.
    """

    row_fields = named("sampler", "random", "state", "prompt_lengths")

    def __init__(self, drafter: DraftModelDrafter, batch: PromptBatch) -> None:
        self.drafter, self.random = drafter, batch.random
        self.num_draft_tokens, self.unread = drafter.num_draft_tokens, 1
        self.vocabulary = batch.prefill.logits.shape[-1]
        self.sampler = batch.sampler
        if drafter.sampling == "greedy":
            self.sampler = replace(self.sampler, temperature=0.0)
        last = drafter.model.vocabulary - 1  # the target may have tokens that the draft lacks
        prompts = [
            {**inputs, "input_ids": inputs["input_ids"].clamp_max(last)}
            for inputs in (request.draft_inputs or request.inputs for request in batch.requests)
        ]
        self.state, _ = drafter.model.prefill(prompts, max(p["input_ids"].shape[1] for p in prompts))
        self.prompt_lengths = self.state.cache.lengths.clone()

    def propose(self, canvas: Canvas) -> Draft:
        # Reading the last two tokens anew, whatever was accepted, keeps one shape for every row: the token
        # before the root may be the draft's own last one, which it has not read yet. Every round that
        # nothing was drafted for has one token more.
        root, emitted = canvas.root, canvas.emitted
        cache, newest = self.state.cache, 1 + self.unread
        self.unread = 0
        lengths = zip(self.state.prompt_lengths, canvas.length_bounds, strict=True)
        cache.longest = max(0, max(map(sum, lengths)) - newest)
        # finished rows may have stopped before there were so many
        cache.lengths.copy_((self.prompt_lengths + emitted - newest).clamp_min(0))
        step = canvas.before(newest)
        if self.drafter.shape is not None:
            return self._tree(canvas, self.drafter.shape, step)
        tokens, distributions, sound = [root], [], torch.ones_like(root, dtype=torch.bool)
        valid = [sound]
        random = self.random.at(emitted[:, None])
        likely, going = torch.ones_like(root, dtype=torch.float32), sound
        for depth in range(self.num_draft_tokens):
            last = Tree.chain(step[:, -1:], DraftKind.POINT)
            # q may be any distribution, if it is the one drawn from: guidance and grammars stay the target's
            scores = self.sampler.scores(self._read(step))
            if self.drafter.stop_below:  # decided by q alone: a decision by the token drawn would bias it
                likely = likely * scores.logits[:, 0].softmax(-1).amax(-1)
                going = going & (likely >= self.drafter.stop_below) if depth else going
                if not going.any():
                    break
            if self.drafter.kind is DraftKind.IID:
                distributions.append(scores.at(torch.zeros_like(emitted)))
                tokens.append(scores.sample(random, emitted[:, None] + depth, Purpose.DRAFT)[:, 0])
            else:
                tokens.append(scores.choose(last, self.random, emitted + depth)[:, 0])
            sound = sound & scores.is_finite()[:, 0]
            valid.append(sound & going)
            step = tokens[-1][:, None]
        q = type(distributions[0]).stack(distributions) if distributions else None
        return Tree.chain(torch.stack(tokens, 1), self.drafter.kind, q, torch.stack(valid, 1), ~sound)

    def _tree(self, canvas: Canvas, shape: StaticTree, unread: Tensor) -> Tree:
        """Grow a tree behind tokens [B, m] that the draft model has not read yet, by one pass a level."""
        noise = self.sampler, self.random, canvas.emitted
        draws = SiblingDraws(self.drafter.kind, *noise, self.vocabulary)
        growth = TreeGrowth(shape, canvas.root, draws=draws)
        logits = self._read(unread)
        while True:
            growth.grow(self.sampler.warp(logits).log_softmax(-1))
            if growth.is_grown:
                return growth.draft()[0]
            logits = self._score(growth.nodes(growth.tokens))

    def resize(self, choice: int) -> None:
        self.num_draft_tokens = self.drafter.sizes[choice]

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.unread += 1
        if self.drafter.shape is not None and draft.max_depth > 1:  # a chain's keys stand where they belong
            slots = constant(self.drafter.shape.slots, draft.tokens.device)[verdict.nodes[:, 1:-1]]
            self.state.cache.commit(slots, (verdict.accepted - 1).clamp_min(0))

    def _read(self, tokens: Tensor) -> Tensor:
        """Feed tokens [B, m] to the draft model; return its logits [B, 1, V] after the last of them."""
        cache = self.state.cache
        logits = self._score(Tree.chain(tokens, DraftKind.POINT).nodes)[:, -1:]
        cache.commit(None, torch.full_like(tokens[:, 0], tokens.shape[1]))
        cache.longest += tokens.shape[1]
        return logits

    def _score(self, nodes: Nodes) -> Tensor:
        """Let the draft model read nodes [B, n] behind what is committed; its logits [B, n, V] after each."""
        self.passes += 1
        model = self.drafter.model
        known = replace(nodes, tokens=nodes.tokens.clamp_max(model.vocabulary - 1))
        return fit_vocabulary(model.score_nodes(self.state, known).logits, self.vocabulary)


class DraftModelDrafter(ModelDrafter):
    """Drafts a chain or a tree of tokens with a smaller model.

    Args:
        model: the draft model behind the Target interface.
        num_draft_tokens: length of the chain; 5 if None.
        sampling: how the draft picks its tokens when the target samples. "coupled" draws with the
            target's own noise, so that both draw the same token wherever their distributions agree, and
            the output stays bitwise that of plain sampling; "sampled" draws independently, for
            rejection rules; "without_replacement" draws each sibling of a tree from what the elder ones left,
            likewise; "greedy" takes the likeliest.
        tree: a static tree in place of the chain: children of every node of each level as "4x2x2", a name in
            `NAMED_TREES`, or the parents of its nodes, the root (0) first.

    Raises:
        InputError: a value outside its range, the length of a chain beside a tree, or a tree that siblings
            cannot be drawn in.
        UnsupportedModelError: the draft model keeps a recurrent state, which does not follow when its cache's
            lengths alone take back what it drafted.
    """

    runs_ahead = True
    rows_move = True
    draws_anew = True
    session = DraftModelSession
    model: CausalTarget

    def __init__(
        self,
        model: CausalTarget,
        num_draft_tokens: int | None = None,
        sampling: str = "coupled",
        tree: str | int | Sequence[int] | None = None,
    ) -> None:
        self.kind = kind_of(sampling)
        if find_mixers(model.model):
            raise UnsupportedModelError(
                f"{type(model.model).__name__} keeps a recurrent state; it can be a target, not a draft model"
            )
        self.model = model
        self.sampling = sampling
        self.stop_below = 0.0
        self.shape: StaticTree | None = None
        if tree is None:
            length = LENGTH if num_draft_tokens is None else num_draft_tokens
            self.num_draft_tokens = check_draft_tokens(length)
        else:
            if num_draft_tokens is not None:
                raise InputError("num_draft_tokens", num_draft_tokens, f"nothing: tree is {tree!r}")
            self.shape = drawable(static_tree(tree), sampling)
            self.num_draft_tokens = self.shape.num_draft_tokens
            self.branches = self.shape.max_children > 1
        self.max_nodes = self.num_draft_tokens + 1

    @property
    def reader(self) -> CausalTarget:
        return self.model

    @property
    def sizes(self) -> tuple[int, ...]:
        return half_lengths(self.num_draft_tokens) if self.shape is None else ()

    def check(self, target: Target[Any]) -> None:
        if self.shape is not None and (most := self.shape.max_children) > target.vocabulary:
            raise InputError("tree", most, f"at most {target.vocabulary} children, the vocabulary")

    def stopping_below(self, probability: float) -> DraftModelDrafter:
        cautious = copy.copy(self)
        if self.shape is None:
            cautious.stop_below = probability
        else:
            cautious.shape = self.shape.stopping_below(probability)
        return cautious


def fit_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Cut or pad logits [..., V'] to [..., V]: models of one tokenizer pad their embeddings differently."""
    surplus = logits.shape[-1] - vocabulary
    if surplus >= 0:
        return logits[..., :vocabulary]
    return torch.nn.functional.pad(logits, (0, -surplus), value=float("-inf"))
