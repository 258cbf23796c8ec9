"""Draft model: a smaller model of the same tokenizer, with its own vision path or from text alone.

Speculative decoding as first published (Leviathan et al., 2211.17192; Chen et al., 2302.01318).
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.distribution import Scores
from mmspec.decoding.draft import Draft, DraftKind, Tree
from mmspec.decoding.interfaces import DraftSession, TargetOutput
from mmspec.decoding.random_stream import Purpose
from mmspec.decoding.rows import named
from mmspec.decoding.verdict import Path
from mmspec.drafters.length import half_lengths
from mmspec.drafters.session import ModelDrafter, PromptBatch
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.registry import did_you_mean
from mmspec.targets import CausalTarget
from mmspec.targets.mixers import find_mixers
from mmspec.validation import check_draft_tokens

KIND_OF_SAMPLING = {
    "coupled": DraftKind.COUPLED,
    "greedy": DraftKind.POINT,
    "sampled": DraftKind.IID,
}


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
        tokens, distributions, sound = [root], [], torch.ones_like(root, dtype=torch.bool)
        step, valid = canvas.before(newest), [sound]
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
                tokens.append(scores.sample(self.random, emitted[:, None] + depth, Purpose.DRAFT)[:, 0])
            else:
                tokens.append(scores.choose(last, self.random, emitted + depth)[:, 0])
            sound = sound & scores.is_finite()[:, 0]
            valid.append(sound & going)
            step = tokens[-1][:, None]
        q = type(distributions[0]).stack(distributions) if distributions else None
        return Tree.chain(torch.stack(tokens, 1), self.drafter.kind, q, torch.stack(valid, 1), ~sound)

    def resize(self, choice: int) -> None:
        self.num_draft_tokens = self.drafter.sizes[choice]

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.unread += 1

    def _read(self, tokens: Tensor) -> Tensor:
        """Feed tokens [B, m] to the draft model; return its logits [B, 1, V] after the last of them."""
        self.passes += 1
        model, cache = self.drafter.model, self.state.cache
        chain = Tree.chain(tokens.clamp_max(model.vocabulary - 1), DraftKind.POINT)
        logits = model.score(self.state, chain).logits[:, -1:]
        cache.commit(None, torch.full_like(tokens[:, 0], tokens.shape[1]))
        cache.longest += tokens.shape[1]
        return fit_vocabulary(logits, self.vocabulary)


class DraftModelDrafter(ModelDrafter):
    """Drafts a chain of tokens with a smaller model.

    Args:
        model: the draft model behind the Target interface.
        num_draft_tokens: length of the chain.
        sampling: how the draft picks its tokens when the target samples. "coupled" draws with the
            target's own noise, so that both draw the same token wherever their distributions agree, and
            the output stays bitwise that of plain sampling; "sampled" draws independently, for
            rejection rules; "greedy" takes the likeliest.

    Raises:
        InputError: a value outside its range.
        UnsupportedModelError: the draft model keeps a recurrent state, which does not follow when its cache's
            lengths alone take back what it drafted.
    """

    runs_ahead = True
    rows_move = True
    session = DraftModelSession
    model: CausalTarget

    def __init__(self, model: CausalTarget, num_draft_tokens: int = 5, sampling: str = "coupled") -> None:
        if sampling not in KIND_OF_SAMPLING:
            raise InputError("sampling", sampling, did_you_mean(sampling, KIND_OF_SAMPLING))
        if find_mixers(model.model):
            raise UnsupportedModelError(
                f"{type(model.model).__name__} keeps a recurrent state; it can be a target, not a draft model"
            )
        self.model = model
        self.num_draft_tokens = check_draft_tokens(num_draft_tokens)
        self.sampling = sampling
        self.stop_below = 0.0
        self.kind = KIND_OF_SAMPLING[sampling]
        self.max_nodes = num_draft_tokens + 1

    @property
    def reader(self) -> CausalTarget:
        return self.model

    @property
    def sizes(self) -> tuple[int, ...]:
        return half_lengths(self.num_draft_tokens)

    def stopping_below(self, probability: float) -> DraftModelDrafter:
        cautious = copy.copy(self)
        cautious.stop_below = probability
        return cautious


def fit_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Cut or pad logits [..., V'] to [..., V]: models of one tokenizer pad their embeddings differently."""
    surplus = logits.shape[-1] - vocabulary
    if surplus >= 0:
        return logits[..., :vocabulary]
    return torch.nn.functional.pad(logits, (0, -surplus), value=float("-inf"))
