"""EAGLE heads with random weights, and a drafter whose drafts are compared with slow drafting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.core import verdict as verdicts
from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft, DraftKind
from mmspec.core.indexing import take
from mmspec.core.interfaces import (
    AcceptanceRule,
    Drafter,
    DraftSession,
    PromptOutput,
    Request,
    list_prompts,
)
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.heads.drafter import HeadDrafter
from mmspec.methods.eagle.head import EagleConfig, EagleHead
from mmspec.targets.causal import CausalTarget
from mmspec.trees.growth import NAMED_TREES, DynamicTree
from tests.methods.naive_eagle import NaiveEagle, Path
from tests.tiny_models import randomise, tiny_lm

WORDS = 16
#: Makes the slow drafting of a head, from a target, the prompts of one request, and a sampler.
SlowWay = Callable[[Any, CausalTarget, list[dict[str, Any]], Sampler], Any]


def head_for(target: CausalTarget, seed: int = 3, **settings: Any) -> EagleHead:
    """A head of random weights."""
    config = EagleConfig.for_target(target.config, target.vocabulary, **settings)
    with torch.random.fork_rng():
        head = EagleHead(config).to(target.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(noise * scale + (parameter.dim() == 1))
    return head.eval().requires_grad_(False)


@functools.cache
def few_words() -> CausalTarget:
    """A float64 model with so few tokens that slow drafting is fast enough."""
    return CausalTarget(tiny_lm(vocab=WORDS))


@functools.cache
def llamagen(dtype: torch.dtype = torch.float64) -> LlamaGenTarget:
    """Images of 4 x 4 cells out of 48 codes, of five classes."""
    config = LlamaGenConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        grid_size=4,
        num_classes=5,
    )
    return LlamaGenTarget(randomise(LlamaGenForCausalLM(config).to(dtype), seed=4))


class Gullible(AcceptanceRule):
    """Accepts the path to some node, a different one in each round, independently of the target."""

    sound_for = frozenset(DraftKind)

    def verify(self, draft: Draft, scores: Scores, random: RandomStream, emitted: Tensor) -> verdicts.Path:
        node = (5 * emitted + torch.arange(len(emitted))) % draft.tokens.shape[1]
        node = node * take(draft.valid, node)
        return verdicts.Path.at(draft, node, take(scores.choose(draft, random, emitted), node))


class Examined(Drafter, DraftSession):
    """A drafter that compares each draft with slow drafting."""

    def __init__(
        self,
        inner: HeadDrafter,
        new_tokens: int,
        slow_way: SlowWay = NaiveEagle,
        tree: str = "eagle",
    ) -> None:
        self.inner, self.new_tokens, self.slow_way, self.drafts = inner, new_tokens, slow_way, 0
        self.tree, self.shape = tree, inner.shape
        self.kind, self.max_nodes, self.taps, self.branches = inner.kind, inner.max_nodes, inner.taps, True
        self.rates_paths = inner.rates_paths

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        assert self.inner.target is not None
        self.session = self.inner.start(requests, prefill, sampler, random)
        prompts = list_prompts(requests, sampler)
        self.naive = [
            self.slow_way(
                self.inner.model, self.inner.target, [dict(p) for p in prompts[row :: len(requests)]], sampler
            )
            for row in range(len(requests))
        ]
        self.observe = self.session.observe  # type: ignore[method-assign]
        return self

    def propose(self, canvas: Canvas) -> Draft:
        draft = self.session.propose(canvas)
        assert not draft.faulty.any()
        for row, output in enumerate(canvas.outputs()):
            if len(output) >= self.new_tokens:
                continue  # finished rows: their drafts do not matter
            shape = self.shape
            if isinstance(shape, DynamicTree):
                expected = self.naive[row].dynamic(output, shape)
            else:
                expected = self.naive[row].static(output, NAMED_TREES[self.tree].split())
            assert paths_of(draft, row) == expected, f"row {row} after {len(output)} tokens"
            self.drafts += 1
        self.likelihoods = self.session.likelihoods
        return draft


def paths_of(draft: Draft, row: int) -> set[Path]:
    """The token paths of a draft's valid nodes."""
    paths: list[Path] = [()]
    for node in range(1, draft.tokens.shape[1]):
        parent = int(draft.parents[row, node])
        paths.append((*paths[parent], int(draft.tokens[row, node])))
    return {path for node, path in enumerate(paths) if node and bool(draft.valid[row, node])}
