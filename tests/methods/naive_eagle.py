"""Slow drafting with an EAGLE head: no cache, no batch, one candidate's path at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from mmspec.core.sampling import Sampler
from mmspec.methods.eagle.head import EagleHead
from mmspec.targets.causal import CausalTarget, HiddenStates
from mmspec.trees.growth import DynamicTree

Path = tuple[int, ...]


def read_whole(
    target: CausalTarget, prompt: dict[str, Any], output: list[int], taps: Sequence[int] = (0, -1)
) -> tuple[dict[int, Tensor], Tensor]:
    """The target's hidden states [1, L, d] at the taps by one forward, and all positions."""
    first, offset = target.positions(prompt)
    ids = torch.cat([prompt["input_ids"], torch.tensor([output], dtype=torch.long)], 1)
    after = (torch.arange(first.shape[-1], ids.shape[1]) + offset).expand(*first.shape[:-1], -1)
    inputs = {**prompt, "input_ids": ids, "position_ids": torch.cat([first, after], -1)}
    inputs.pop("attention_mask", None)
    with closing(HiddenStates(target.model, taps)) as reader:
        target.model(**inputs)
    return reader.take(), inputs["position_ids"]


class NaiveEagle:
    """The head on one request.

    Args:
        prompts: its prompt; under guidance the negative one as well.
    """

    def __init__(
        self, head: EagleHead, target: CausalTarget, prompts: list[dict[str, Any]], sampler: Sampler
    ) -> None:
        self.head, self.target, self.prompts, self.sampler = head, target, prompts, sampler
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}

    def distribution(self, output: list[int], path: Path) -> Tensor:
        """[V] the head's log-probabilities after the emitted tokens and a path of candidates."""
        logits = torch.stack([self.logits(prompt, output, path) for prompt in self.prompts])
        if len(self.prompts) == 2:
            conditional, unconditional = logits.log_softmax(-1)
            logits = (unconditional + self.sampler.guidance_scale * (conditional - unconditional))[None]
        if not self.sampler.greedy:
            logits = logits / self.sampler.temperature
        return logits[0].log_softmax(-1)

    def logits(self, prompt: dict[str, Any], output: list[int], path: Path) -> Tensor:
        """[V] raw, of one prompt."""
        rows, positions, summary = self.committed(prompt, output)
        for token in (*path, None):
            hidden = self.head(rows, positions)
            if token is not None:  # its own prediction replaces the target's state
                drafted = self.target.embed(torch.tensor([[token]]))
                rows = torch.cat([rows, self.head.fuse(drafted, hidden[:, -1:], summary)], 1)
                positions = torch.cat([positions, positions[..., -1:] + 1], -1)
        logits: Tensor = self.target.head(hidden[:, -1])[0]
        return logits

    def committed(self, prompt: dict[str, Any], output: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the head's rows at all tokens but the first, their positions, and inputs of later rows."""
        key = id(prompt), len(output)
        if key not in self.known:
            self.known[key] = self.rows(prompt, *read_whole(self.target, prompt, output))
        return self.known[key]

    def rows(
        self, prompt: dict[str, Any], taps: dict[int, Tensor], positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Make the result of `committed`, of the target's states and positions at the whole sequence."""
        return self.head.fuse(taps[0][:, 1:], taps[-1][:, :-1]), positions[..., 1:], None

    def dynamic(self, output: list[int], shape: DynamicTree) -> set[Path]:
        """The proposed paths of a dynamic tree."""
        pool: dict[Path, float] = {}
        frontier: list[tuple[Path, float]] = [((), 0.0)]
        for _ in range(shape.depth):
            level = []
            for path, score in frontier:
                values, tokens = self.distribution(output, path).topk(shape.top_k)
                level += [
                    ((*path, token), score + value)
                    for value, token in zip(values.tolist(), tokens.tolist(), strict=True)
                ]
            pool.update(level)
            frontier = sorted(level, key=lambda node: -node[1])[: shape.top_k]
        return {path for path, _ in sorted(pool.items(), key=lambda node: -node[1])[: shape.num_draft_tokens]}

    def static(self, output: list[int], ranks: list[str]) -> set[Path]:
        """The proposed paths of a static tree, given by the ranks along each."""
        found: dict[str, Path] = {"": ()}
        for name in sorted(ranks, key=len):
            distribution = self.distribution(output, found[name[:-1]])
            found[name] = (*found[name[:-1]], int(distribution.topk(int(name[-1]) + 1).indices[-1]))
        return {path for path in found.values() if path}
