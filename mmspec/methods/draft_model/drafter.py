"""Drafter of a draft model: a smaller model of the same tokenizer, which reads images too or text alone.

Speculative decoding as first published (Leviathan et al., 2211.17192; Chen et al., 2302.01318), and with
several candidates for a place (SpecTr, 2310.15141; MCSD, 2401.06706).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.chunked_prefill import ChunkedPrefill
from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft, DraftKind, Nodes, Tree
from mmspec.core.indexing import pick
from mmspec.core.interfaces import AnyTarget, DraftSession, Request, TargetOutput, TargetState
from mmspec.core.random_stream import Purpose
from mmspec.core.rows import named
from mmspec.core.sampling import AnySampler
from mmspec.core.session import ModelDrafter, PromptBatch
from mmspec.core.verdict import Path
from mmspec.errors import CheckpointError, InputError, UnsupportedModelError
from mmspec.heads.frequent_output import restrict_output
from mmspec.targets import CausalTarget
from mmspec.targets.encoder_decoder import ENCODED, EncoderDecoderTarget, shares_encoder
from mmspec.targets.mixers import find_mixers
from mmspec.targets.thinned import attention_behind, guided_and_even
from mmspec.trees.growth import StaticTree, TreeGrowth, constant, drawable, static_tree
from mmspec.trees.pacing import half_lengths
from mmspec.trees.siblings import SiblingDraws, kind_of
from mmspec.validation import check_draft_tokens, is_integer, require_number
from mmspec.visual_tokens.spans import find_images

NAME = "draft_model"
LENGTH = 5  # default length of a chain
MASS = 0.4  # of the attention to visual tokens, as published (2508.16201)


class DraftModelSession(DraftSession):
    """Draft model and its KV cache for one batch.

    Attributes:
        num_draft_tokens: length of the next chain.
        unread: bound of the committed tokens before the root that the draft model has not read since its
            last draft.
        proposed: its draft of this round.
    """

    row_fields = named("sampler", "random", "state", "prompt_lengths")
    scratch = DraftSession.scratch | {"proposed"}

    proposed: Draft | None = None

    def __init__(self, drafter: DraftModelDrafter, batch: PromptBatch) -> None:
        self.drafter, self.random = drafter, batch.random
        self.num_draft_tokens, self.unread = drafter.num_draft_tokens, 1
        self.vocabulary = batch.prefill.logits.shape[-1]
        self.sampler = batch.sampler
        if drafter.sampling == "greedy":
            self.sampler = replace(self.sampler, temperature=0.0)
        last = drafter.model.vocabulary - 1  # the target may have tokens that the draft model lacks
        prompts = [
            {**inputs, "input_ids": inputs["input_ids"].clamp_max(last)}
            for inputs in (request.draft_inputs or request.inputs for request in batch.requests)
        ]
        if drafter.shares_encoder:
            known: Any = batch.prefill.cache
            tokens = ({"input_ids": prompt["input_ids"]} for prompt in prompts)
            prompts = [own | encoded for own, encoded in zip(tokens, known.inputs, strict=False)]
        self.waiting: PromptBatch | None = batch  # until the target's state is attached, for `places`
        self.prompts: Sequence[Mapping[str, Tensor]] = prompts
        self.places: Sequence[Tensor | None] | None = None

    def attach(self, state: Any) -> None:
        if self.waiting is not None and self.drafter.keep is not None:
            self.places = self.drafter.places(self.prompts, self.waiting, state)
        self.waiting = None

    def deferred_prefill(self) -> ChunkedPrefill[None]:
        if not self.prompts:
            return
        longest = max(prompt["input_ids"].shape[1] for prompt in self.prompts)
        model = self.drafter.model
        if self.places is None:
            self.state, _ = yield from model.chunked_prefill(self.prompts, longest)
        else:
            self.state, _ = model.prefill_part(self.prompts, self.places, longest)
        self.prompt_lengths = self.state.cache.lengths.clone()
        self.prompts, self.places = [], None

    def propose(self, canvas: Canvas) -> Draft:
        self.prepare()
        # Reading the last two tokens again, whatever was accepted, keeps one shape for all rows: the token
        # before the root may be the draft's own last one, which was not read yet. Every round without a
        # draft adds one unread token, and others' candidates add more.
        emitted, newest, self.unread = canvas.emitted, self.room or 1 + self.unread, 0
        cache = self.state.cache
        # rows that entered later have fewer tokens, and finished rows may have stopped before
        counts = None if newest <= 2 else (emitted + 1).clamp_max(newest)
        lengths = zip(self.state.prompt_lengths, canvas.length_bounds, strict=True)
        cache.longest = max(0, max(map(sum, lengths)) - min(newest, 2))
        kept = self.prompt_lengths + emitted - (newest if counts is None else counts)
        cache.lengths.copy_(kept.clamp_min(0))
        self.proposed = self._draft(canvas, canvas.before(newest), counts)
        return self.proposed

    def _draft(self, canvas: Canvas, step: Tensor, counts: Tensor | None) -> Draft:
        """Draft after the last tokens [B, m], of which rows read counts [B]; all of them if None."""
        root, emitted = canvas.root, canvas.emitted
        ahead = 0 if self.drafter.mask_token is None else self.num_draft_tokens - 1
        logits = self._read(step, counts, ahead)
        if self.drafter.shape is not None:
            return self._tree(canvas, self.drafter.shape, logits)
        tokens, distributions, sound = [root], [], torch.ones_like(root, dtype=torch.bool)
        valid = [sound]
        random = self.random.at(emitted[:, None])
        likely, going = torch.ones_like(root, dtype=torch.float32), sound
        for depth in range(self.num_draft_tokens):
            last = Tree.chain(tokens[-1][:, None], DraftKind.POINT)
            # any q is sound that the draft is drawn from: guidance and grammars act in the target alone
            known = depth < logits.shape[1]
            said = logits[:, depth, None] if known else self._read(tokens[-1][:, None])
            scores = self.sampler.scores(said)
            if self.drafter.stop_below:  # decided by q alone: the drawn token would bias the decision
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
        q = type(distributions[0]).stack(distributions) if distributions else None
        return Tree.chain(torch.stack(tokens, 1), self.drafter.kind, q, torch.stack(valid, 1), ~sound)

    def _tree(self, canvas: Canvas, shape: StaticTree, logits: Tensor) -> Tree:
        """Grow a tree from the root's logits [B, 1, V], with one forward pass of the draft model a level."""
        noise = self.sampler, self.random, canvas.emitted
        draws = SiblingDraws(self.drafter.kind, *noise, self.vocabulary)
        growth = TreeGrowth(shape, canvas.root, draws)
        while True:
            growth.grow(self.sampler.warp(logits).log_softmax(-1))
            if growth.is_grown:
                return growth.draft()[0]
            logits = self._score(growth.nodes(growth.tokens))

    def use_few_sizes(self, room: int = 0) -> None:
        super().use_few_sizes(room)
        self.room = room
        if room:
            self.unread = 0  # of no effect now; graphs are not to depend on it

    def resize(self, choice: int) -> None:
        self.num_draft_tokens = self.drafter.sizes[choice]

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        proposed, self.proposed = self.proposed, None
        if self.room:  # the last tokens of that number are read again, whatever was read
            return
        self.unread += 1
        if draft is not proposed or self.drafter.mask_token is not None:
            self.unread += draft.max_depth
        elif self.drafter.shape is not None and draft.max_depth > 1:  # keys of a chain are in place already
            slots = constant(self.drafter.shape.slots, draft.tokens.device)[verdict.nodes[:, 1:-1]]
            self.state.cache.commit(slots, (verdict.accepted - 1).clamp_min(0))

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        both = super().joined(other, counts)
        both.unread = max(self.unread, other.unread)
        return both

    def _read(self, tokens: Tensor, counts: Tensor | None = None, ahead: int = 0) -> Tensor:
        """Feed tokens [B, m] to the draft model; return logits [B, 1 + ahead, V] from the last of them on.

        Args:
            tokens: the last ones of each row.
            counts: [B] how many of them a row reads, from 1 on; all if None.
            ahead: number of masks behind them, which are not kept.
        """
        cache, most = self.state.cache, tokens.shape[1]
        if ahead and counts is None:
            counts = torch.full_like(tokens[:, 0], most)
        if counts is not None:  # to the front, since padding must not be seen
            place = torch.arange(most, device=tokens.device) + (most - counts)[:, None]
            tokens = tokens.gather(1, place.clamp_max(most - 1))
        if ahead and counts is not None:
            tokens = pad(tokens, (0, ahead))
            slot = torch.arange(most + ahead, device=tokens.device)
            tokens = tokens.masked_fill(slot >= counts[:, None], self.drafter.mask_token or 0)
        logits = self._score(Tree.chain(tokens, DraftKind.POINT).nodes)
        cache.longest += most
        if counts is None:
            cache.commit(None, torch.full_like(tokens[:, 0], most))
            return logits[:, -1:]
        cache.commit(None, counts)
        return pick(logits, (counts - 1)[:, None] + torch.arange(1 + ahead, device=tokens.device))

    def _score(self, nodes: Nodes) -> Tensor:
        """Score nodes [B, n] after the committed tokens with the draft model; return logits [B, n, V]."""
        self.passes += 1
        model = self.drafter.model
        known = replace(nodes, tokens=nodes.tokens.clamp_max(model.vocabulary - 1))
        return fit_vocabulary(model.score_nodes(self.state, known).logits, self.vocabulary)


class DraftModelDrafter(ModelDrafter):
    """Drafts a chain or a tree of tokens with a smaller model.

    Args:
        model: the draft model behind the Target interface; its class before it is loaded, to check the other
            arguments. If its config has `draft_tokens`, it drafts those tokens alone. If it has `pard_token`,
            it drafts a chain in one forward pass, over masks of that token (PARD, 2504.18583).
        num_draft_tokens: length of the chain, 1 to 512; 5 if None.
        sampling: how the draft model chooses its tokens when the target samples. "coupled" draws with the
            target's own noise, so that equal distributions give equal tokens and the output is bitwise that
            of plain sampling. "sampled" draws independently, for rejection rules. "without_replacement" draws
            each sibling of a tree from the tokens that are left, also for rejection rules. "greedy" takes the
            likeliest.
        keep: share of the visual tokens of a prompt that the draft model reads, 0 to 1, at their own
            positions. The target reads all of them; all if None.
        mass: with `keep`: least share, 0 to 1, of the target's attention to visual tokens on those chosen by
            attention, as far as `keep` allows. The rest of `keep` is spread evenly over the others, with 0
            all of it; 0.4 if None.
        tree: a static tree in place of the chain: the children of every node of each level as "4x2x2";
            "eagle", "medusa" or "wide"; or the parents of its nodes, the root (0) first; a chain if None.

    Raises:
        InputError: a value is out of range, the length of a chain is given beside a tree, or siblings cannot
            be drawn in the tree.
        UnsupportedModelError: the draft model keeps a recurrent state, which cannot be rolled back by
            shortening the cache.
    """

    runs_ahead = True
    shares_tree = True
    rows_move = True
    draws_anew = True
    session = DraftModelSession
    model: CausalTarget
    target: CausalTarget | None = None
    mask_token: int | None = None
    shares_encoder: bool = False  # with the target: the draft model reads the output of the target's encoder

    def __init__(
        self,
        model: CausalTarget | type[CausalTarget],
        num_draft_tokens: int | None = None,
        sampling: str = "coupled",
        tree: str | int | Sequence[int] | None = None,
        keep: float | None = None,
        mass: float | None = None,
    ) -> None:
        self.kind = kind_of(sampling)
        self.keep, self.mass = keep, MASS if mass is None else mass
        require_number("mass", self.mass, 0.0, 1.0, "must be a share of attention from 0 to 1")
        if keep is not None:
            require_number("keep", keep, 0.0, 1.0, "must be a share of visual tokens from 0 to 1")
            if (model if isinstance(model, type) else type(model)).prefill is not CausalTarget.prefill:
                rule = "must be None: this draft model cannot read a part of a prompt"
                raise InputError("keep", keep, rule)
        elif mass is not None:
            raise InputError("mass", mass, "must be None without keep")
        if not isinstance(model, type):
            if find_mixers(model.model):
                raise UnsupportedModelError(
                    f"{type(model.model).__name__} keeps a recurrent state, which cannot be rolled back; use "
                    "it as a target, with another draft model"
                )
            restrict_output(model.model)
            self.model = model
            self.mask_token = mask_token_of(model.model.config)
            if self.mask_token is not None and tree is not None:
                rule = "must be None: a parallel draft model (`pard_token`) drafts a chain"
                raise InputError("tree", tree, rule)
        self.sampling = sampling
        self.stop_below = 0.0
        self.shape: StaticTree | None = None
        if tree is None:
            length = LENGTH if num_draft_tokens is None else num_draft_tokens
            self.num_draft_tokens = check_draft_tokens(length)
        else:
            if num_draft_tokens is not None:
                rule = f"must be None beside tree={tree!r}"
                raise InputError("num_draft_tokens", num_draft_tokens, rule)
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

    def check(self, target: AnyTarget) -> None:
        if self.shape is not None and (most := self.shape.max_children) > target.vocabulary:
            raise InputError("tree", most, f"must have at most {target.vocabulary} children, the vocabulary")

    def fit(self, target: AnyTarget) -> DraftModelDrafter:
        self.check(target)
        if self.keep is not None and not isinstance(target, CausalTarget):
            raise InputError("keep", self.keep, "must be None: this target's attention cannot be read")
        if isinstance(target, EncoderDecoderTarget) and not isinstance(self.model, EncoderDecoderTarget):
            rule = "must be an encoder-decoder, as its target is"
            raise InputError("drafter", type(self.model.model).__name__, rule)
        shares = shares_encoder(self.model, target)
        if self.keep is None and shares == self.shares_encoder:
            return self
        fitted = copy.copy(self)
        fitted.shares_encoder = shares
        if isinstance(target, CausalTarget):
            fitted.target = target
        return fitted

    def admit(self, requests: Sequence[Request], sampler: AnySampler, stopping: Stopping) -> None:
        super().admit(requests, sampler, stopping)
        if not self.shares_encoder and any(ENCODED in request.inputs for request in requests):
            rule = "must have the encoder of its target, whose output is all that `generate` passes on"
            raise InputError("drafter", type(self.model.model).__name__, rule)

    def places(
        self, prompts: Sequence[Mapping[str, Tensor]], batch: PromptBatch, state: TargetState
    ) -> list[Tensor | None]:
        """Return the places of each prompt that the draft model reads; None for all.

        Args:
            prompts: of the draft model.
            batch, state: of the target.

        Raises:
            InputError: the two models have different numbers of visual tokens for a prompt.
        """
        if self.target is None or self.keep is None:
            rule = "must be fitted to a target first: `drafter.fit(target)`"
            raise InputError("drafter", type(self).__name__, rule)
        whole = [request.inputs for request in batch.requests]
        seen = [visual_places(self.target.config, prompt) for prompt in whole]
        longest = max(prompt["input_ids"].shape[1] for prompt in whole)
        weights = torch.zeros(len(seen), longest, dtype=torch.float32, device="cpu")
        if self.keep and self.mass and any(map(len, seen)):
            weights = attention_behind(self.target, state, batch.prefill.logits.argmax(-1)).cpu()
        chosen: list[Tensor | None] = []
        for prompt, there, paid in zip(prompts, seen, weights, strict=False):
            here = visual_places(self.model.config, prompt)
            if len(here) != len(there):
                counts = f"{len(here)} visual tokens where the target has {len(there)}"
                raise InputError("keep", self.keep, f"must be None: the draft model has {counts}")
            kept = guided_and_even(paid[there], round(self.keep * len(there)), self.mass)
            is_read = torch.ones(prompt["input_ids"].shape[1], dtype=torch.bool, device="cpu")
            is_read[here] = False
            is_read[here[kept]] = True
            chosen.append(is_read.nonzero()[:, 0].to(self.model.device) if len(here) else None)
        return chosen

    def stopping_below(self, probability: float) -> DraftModelDrafter:
        cautious = copy.copy(self)
        if self.shape is None:
            cautious.stop_below = probability
        else:
            cautious.shape = self.shape.stopping_below(probability)
        return cautious


def mask_token_of(config: PreTrainedConfig) -> int | None:
    """Return the token that a parallel draft model reads in place of unknown tokens; None for others.

    Raises:
        CheckpointError: it is no token of its vocabulary.
    """
    token, size = getattr(config, "pard_token", None), int(config.get_text_config(decoder=True).vocab_size)
    if token is None:
        return None
    if not is_integer(token) or not 0 <= token < size:
        raise CheckpointError("pard_token", token, f"must be a token from 0 to {size - 1}, or absent")
    return int(token)


def visual_places(config: PreTrainedConfig, prompt: Mapping[str, Tensor]) -> Tensor:
    """Return the indices [N] of a prompt's visual tokens."""
    spans = [range(span.start, span.stop) for span in find_images(config, prompt)]
    return torch.tensor([place for span in spans for place in span], dtype=torch.long, device="cpu")


def fit_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Cut or pad logits [..., V'] to [..., V]: models of one tokenizer pad their embeddings differently."""
    surplus = logits.shape[-1] - vocabulary
    if surplus >= 0:
        return logits[..., :vocabulary]
    return pad(logits, (0, -surplus), value=float("-inf"))
