"""What a FLASH head should propose, the slow way: no cache, no batch, one candidate's path at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.tree import DynamicTree
from mmspec.models.feature_head import Prompts
from mmspec.models.flash import FlashHead
from mmspec.targets.causal import CausalTarget
from mmspec.visual_tokens.spans import find_images
from tests.drafters.naive_eagle import Path, read_whole


class NaiveFlash:
    """The head on one request.

    Args:
        prompts: its inputs; under guidance the negative ones as well.
        block: tokens of a pass.
    """

    def __init__(
        self,
        head: FlashHead,
        target: CausalTarget,
        prompts: list[dict[str, Any]],
        sampler: Sampler,
        block: int,
    ) -> None:
        self.head, self.target, self.prompts, self.sampler, self.block = head, target, prompts, sampler, block
        self.known: dict[tuple[int, int], Tensor] = {}

    def distribution(self, output: list[int], path: Path) -> Tensor:
        """[V] the head's log-probabilities after the emitted tokens and a path of candidates."""
        logits = torch.cat([self.logits(prompt, output, path) for prompt in self.prompts])
        logits = self.sampler.guided(logits[:, None])[0, 0]
        if not self.sampler.greedy:
            logits = logits / self.sampler.temperature
        return logits.log_softmax(-1)

    def logits(self, prompt: dict[str, Any], output: list[int], path: Path) -> Tensor:
        """[1, V] raw, of one prompt."""
        rows = self.committed(prompt, output)
        drafted = self.target.embed(torch.tensor([path], dtype=torch.long)) if path else rows[:, :0]
        for start in range(0, len(path) - self.block + 1, self.block):
            predicted = self.head.predict(self.state(rows), self.block)
            stretch = drafted[:, start : start + self.block]
            rows = torch.cat([rows, self.head.fuse(stretch, predicted)], 1)
        offset = len(path) % self.block
        predicted = self.head.predict(self.state(rows), offset + 1)[:, offset]
        newest = path[-1] if path else output[-1]
        return self.target.head(predicted) + self.head.bias(torch.tensor([newest]))

    def state(self, rows: Tensor) -> Tensor:
        """[1, d] at the last row."""
        hidden: Tensor = self.head(rows, torch.arange(rows.shape[1])[None])
        return hidden[:, -1]

    def committed(self, prompt: dict[str, Any], output: list[int]) -> Tensor:
        """The rows of prompt and output, images compressed, by one forward of the target over all."""
        key = id(prompt), len(output)
        if key not in self.known:
            taps, _ = read_whole(self.target, prompt, output)
            spans = [find_images(self.target.config, prompt)]
            question = torch.tensor([prompt["input_ids"].shape[1] - 1])
            made = self.head.read_prompts(Prompts(taps[0], taps[-1], [taps[0].shape[1]], spans, question))
            self.known[key] = made.rows
        return self.known[key]

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
