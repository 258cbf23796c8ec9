"""Drafts of continuous tokens by a smaller model that draws vectors.

Candidates are verified by speculative sampling (2211.17192) with densities in place of probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Continuous, Distribution
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.interfaces import AnyTarget, DraftSession
from mmspec.core.random_stream import Purpose
from mmspec.core.session import ModelDrafter, PromptBatch
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from mmspec.trees.siblings import kind_of
from mmspec.validation import check_draft_tokens

__all__ = ["VectorModelDrafter"]


class VectorModelSession(DraftSession):
    """Draft model and its KV cache for one batch.

    A place that a round left undecided is drafted again from the same context with the same noise, so that
    the rule sees the candidate that it rejected.
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
        self._read(tokens[-1], canvas, self.drafter.num_draft_tokens)  # for its keys, if all are accepted
        q = type(distributions[0]).stack(distributions) if self.drafter.kind is DraftKind.IID else None
        return Tree.chain(torch.stack(tokens, 1), self.drafter.kind, q)

    def _read(self, token: Tensor, canvas: Canvas, depth: int) -> Distribution:
        """Feed one vector a row [B, d] at a depth; return the distributions [B] of the next ones."""
        self.passes += 1
        chain = Tree.chain(token[:, None], DraftKind.POINT)
        output = self.drafter.model.score(self.state, chain)
        self.state.cache.commit(None, torch.ones_like(self.prompt_lengths))
        self.state.cache.longest += 1
        scores: Distribution = self.sampler(output.logits, chain, canvas.history, canvas.emitted + depth)
        return scores.at(torch.zeros_like(canvas.emitted))


class VectorModelDrafter(ModelDrafter):
    """Drafts a chain of vectors with a smaller model of the same latent space.

    Args:
        model: the draft model behind the Target interface.
        num_draft_tokens: length of the chain.
        sampling: "sampled" draws with noise of its own, for rules that compare densities; "coupled" with the
            target's noise, for rules that compare values.

    Raises:
        InputError: the length is out of range, or `sampling` is another name.
    """

    distribution = Continuous
    session = VectorModelSession

    def __init__(self, model: CausalTarget, num_draft_tokens: int = 3, sampling: str = "sampled") -> None:
        self.model, self.kind = model, kind_of(sampling, ("coupled", "sampled"))
        self.num_draft_tokens = check_draft_tokens(num_draft_tokens)
        self.max_nodes = num_draft_tokens + 1

    def check(self, target: AnyTarget) -> None:
        if target.vector_size != self.model.vector_size:
            rule = f"must be a model of vectors of size {target.vector_size}, the target's"
            raise InputError("drafter", f"vectors of size {self.model.vector_size}", rule)
