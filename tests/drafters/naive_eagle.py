"""What an EAGLE head should propose, the slow way: no cache, no batch, one candidate's path at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.tree import DynamicTree
from mmspec.models.eagle import EagleHead
from mmspec.targets.causal import CausalTarget, tap_hidden_states

Path = tuple[int, ...]


class NaiveEagle:
    """The head on one request.

    Args:
        prompts: its prompt; under guidance the negative one as well.
    """

    def __init__(
        self, head: EagleHead, target: CausalTarget, prompts: list[dict[str, Tensor]], sampler: Sampler
    ) -> None:
        self.head, self.target, self.prompts, self.sampler = head, target, prompts, sampler
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def law(self, output: list[int], path: Path) -> Tensor:
        """[V] the head's log-probabilities after the emitted tokens and a path of candidates."""
        logits = torch.stack([self.logits(prompt, output, path) for prompt in self.prompts])
        if len(self.prompts) == 2:
            conditional, unconditional = logits.log_softmax(-1)
            logits = (unconditional + self.sampler.guidance_scale * (conditional - unconditional))[None]
        if not self.sampler.greedy:
            logits = logits / self.sampler.temperature
        return logits[0].log_softmax(-1)

    def logits(self, prompt: dict[str, Tensor], output: list[int], path: Path) -> Tensor:
        """[V] raw, of one prompt."""
        embeddings, features, positions = self.committed(prompt, output)
        drafted = self.target.embed(torch.tensor([path], dtype=torch.long)) if path else embeddings[:, :0]
        for step in range(len(path) + 1):
            rows = torch.cat([embeddings, drafted[:, :step]], 1)
            places = positions[:, :1] + torch.arange(rows.shape[1])
            hidden = self.head(self.head.fuse(rows, features), places)
            features = torch.cat([features, hidden[:, -1:]], 1)  # its own guess stands for the target's state
        logits: Tensor = self.target.head(hidden[:, -1])[0]
        return logits

    def committed(self, prompt: dict[str, Tensor], output: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The head's input at all tokens but the first: embeddings, the target's states before, positions."""
        key = id(prompt), len(output)
        if key not in self.known:
            first, offset = self.target.positions(prompt)
            length = prompt["input_ids"].shape[1] + len(output)
            positions = torch.arange(length)[None] + offset
            assert torch.equal(positions[:, : first.shape[1]], first)
            ids = torch.cat([prompt["input_ids"], torch.tensor([output])], 1)
            inputs = {**prompt, "input_ids": ids, "position_ids": positions}
            with tap_hidden_states(self.target.model, (0, -1)) as taps:
                self.target.model(**inputs)
            self.known[key] = taps[0][:, 1:], taps[-1][:, :-1], positions[:, 1:]
        return self.known[key]

    def dynamic(self, output: list[int], shape: DynamicTree) -> set[Path]:
        """The proposed paths of a dynamic tree."""
        pool: dict[Path, float] = {}
        frontier: list[tuple[Path, float]] = [((), 0.0)]
        for _ in range(shape.depth):
            level = []
            for path, score in frontier:
                values, tokens = self.law(output, path).topk(shape.top_k)
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
            law = self.law(output, found[name[:-1]])
            found[name] = (*found[name[:-1]], int(law.topk(int(name[-1]) + 1).indices[-1]))
        return {path for path in found.values() if path}
