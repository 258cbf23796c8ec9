"""Drafters of continuous tokens: a smaller model that draws vectors, and a window of the target's own.

The model's candidates are judged by speculative sampling (2211.17192) with densities in place of
probabilities. In the window, a place whose condition hardly changes draws nearly the same vector again,
because its noise is the same (GS, 2510.24211, for discrete tokens). `SharedNoise` says how near is near
enough; at tolerance 0 the vectors are those of plain decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.distribution import Distribution
from mmspec.decoding.draft import Draft, DraftKind, Tree
from mmspec.decoding.indexing import pick
from mmspec.decoding.interfaces import DraftSession, Target, TargetOutput
from mmspec.decoding.random_stream import Purpose
from mmspec.decoding.verdict import Path
from mmspec.drafters.session import ModelDrafter, PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.targets import CausalTarget
from mmspec.validation import check_draft_tokens, is_integer

__all__ = ["VectorModelDrafter", "VectorWindowDrafter"]

MAX_WINDOW = 128
KIND_OF_SAMPLING = {"sampled": DraftKind.IID, "coupled": DraftKind.COUPLED}


class VectorModelSession(DraftSession):
    """Draft model and its KV cache for one batch.

    A place that a round left open is drafted again from the same context with the same noise, so that the
    rule meets the very candidate that it has refused.
    """

    def __init__(self, drafter: VectorModelDrafter, batch: PromptBatch) -> None:
        self.drafter, self.random = drafter, batch.random
        self.sampler = batch.sampler.of_model(drafter.model)
        self.purpose = Purpose.DRAFT if drafter.kind is DraftKind.IID else Purpose.TARGET
        prompts = batch.prompts
        longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
        self.copies = len(prompts) // len(batch.requests)  # of the batch: 2 under guidance
        self.state, _ = drafter.model.prefill(prompts, longest)
        self.prompt_lengths = self.state.cache.lengths.clone()

    def propose(self, canvas: Canvas) -> Draft:
        cache = self.state.cache
        lengths = zip(self.state.prompt_lengths, canvas.length_bounds * self.copies, strict=True)
        cache.longest = max(map(sum, lengths)) - 1
        # the root has not been read
        cache.lengths.copy_(self.prompt_lengths + canvas.emitted.repeat(self.copies) - 1)
        tokens, distributions = [canvas.root], list[Distribution]()
        for depth in range(self.drafter.num_draft_tokens):
            predicted = self._read(tokens[-1], canvas, depth)
            token, judged_by = predicted.candidate(self.random, canvas.emitted + depth, self.purpose)
            tokens.append(token)
            distributions.append(judged_by)
        self._read(tokens[-1], canvas, self.drafter.num_draft_tokens)  # for its keys, should all be accepted
        q = type(distributions[0]).stack(distributions) if self.drafter.kind is DraftKind.IID else None
        return Tree.chain(torch.stack(tokens, 1), self.drafter.kind, q)

    def _read(self, token: Tensor, canvas: Canvas, depth: int) -> Distribution:
        """Feed a vector of each row [B, d] at a depth; the distributions [B] of the next ones."""
        self.passes += 1
        chain = Tree.chain(token[:, None], DraftKind.POINT)
        output = self.drafter.model.score(self.state, chain)
        self.state.cache.commit(None, torch.ones_like(self.prompt_lengths))
        self.state.cache.longest += 1
        scores: Distribution = self.sampler(output.logits, chain, canvas.ids, canvas.emitted + depth)
        return scores.at(torch.zeros_like(canvas.emitted))


class VectorModelDrafter(ModelDrafter):
    """Drafts a chain of vectors with a smaller model of the same latent space.

    Args:
        model: the draft model behind the Target interface.
        num_draft_tokens: length of the chain.
        sampling: "sampled" draws with noise of its own, for rules that judge by densities; "coupled" with
            that of the target, for rules that compare values.

    Raises:
        InputError: a length outside its range, or another way of sampling.
    """

    proposes = "vectors"
    session = VectorModelSession

    def __init__(self, model: CausalTarget, num_draft_tokens: int = 3, sampling: str = "sampled") -> None:
        if sampling not in KIND_OF_SAMPLING:
            raise InputError("sampling", sampling, did_you_mean(sampling, KIND_OF_SAMPLING))
        self.model, self.kind = model, KIND_OF_SAMPLING[sampling]
        self.num_draft_tokens = check_draft_tokens(num_draft_tokens)
        self.max_nodes = num_draft_tokens + 1

    def check(self, target: Target[Any]) -> None:
        if target.vector_size != self.model.vector_size:
            allowed = f"a model of vectors of size {target.vector_size}, as the target's"
            raise InputError("drafter", f"vectors of size {self.model.vector_size}", allowed)


class VectorWindowSession(DraftSession):
    """Window of drafts of one batch.

    Attributes:
        values: [B, n, d] what the target drew after each node of the last draft.
        accepted: [B] how many of its tokens were accepted.
    """

    values: Tensor
    accepted: Tensor

    def __init__(self, drafter: VectorWindowDrafter, batch: PromptBatch) -> None:
        self.window, self.begun = drafter.window, False

    def propose(self, canvas: Canvas) -> Draft:
        root = canvas.root
        if not self.begun:  # of the places behind the prompt nothing is known: the first vector stands in
            self.values, self.accepted, self.begun = root[:, None], torch.zeros_like(canvas.emitted), True
        scored = self.values.shape[1]
        # the value after node i is the candidate for node i - accepted of the new window; the last stands in
        node = (self.accepted[:, None] + torch.arange(self.window, device=root.device)).clamp_max(scored - 1)
        tokens = pick(self.values, node)
        tokens[:, 0] = root
        place = canvas.emitted[:, None] - 1 + torch.arange(self.window, device=root.device)
        valid = place < canvas.stopping[0].max_new_tokens
        valid[:, 0] = True
        return Tree.chain(tokens, DraftKind.COUPLED, valid=valid)

    def observe(self, draft: Tree, output: TargetOutput, scores: Distribution, verdict: Path) -> None:
        self.values, self.accepted = verdict.values, verdict.accepted


class VectorWindowDrafter(SessionDrafter):
    """Drafts a window of vectors: what the target drew for these places in the last round.

    Args:
        window: nodes fed per forward, the root included; 1 is plain decoding.

    Raises:
        InputError: a window outside its range.
    """

    kind = DraftKind.COUPLED
    proposes = "vectors"
    session = VectorWindowSession

    def __init__(self, window: int = 16) -> None:
        if not is_integer(window) or not 1 <= window <= MAX_WINDOW:
            raise InputError("window", window, f"an integer from 1 to {MAX_WINDOW}")
        self.window = self.max_nodes = window

    def check(self, target: Target[Any]) -> None:
        if not target.vector_size or target.any_order:
            raise InputError("accelerator", "shared_noise", "a causal model of continuous tokens")
