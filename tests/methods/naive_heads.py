"""Slow drafting with Medusa, Hydra and FLASH: no cache, no batch, one path at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.heads.model import Prompts
from mmspec.visual_tokens.spans import find_images
from tests.methods.naive_eagle import NaiveEagle, Path, read_whole


class NaiveMedusa(NaiveEagle):
    """The heads on one request."""

    def logits(self, prompt: dict[str, Any], output: list[int], path: Path) -> Tensor:
        """Return raw logits [V]. Head i depends only on the length of the path."""
        blocks, state = self.head.blocks[len(path)], self.states(prompt, output)[0, -1]  # type: ignore[index]
        for block in blocks:  # type: ignore[union-attr]
            state = state + torch.nn.functional.silu(block.weight @ state + block.bias)
        if not self.head.config.own_lm_heads:
            state = self.head.maps[len(path)](state)  # type: ignore[index]
        return self.read_out(state, len(path))

    def states(self, prompt: dict[str, Any], output: list[int]) -> Tensor:
        """[1, L, d] the target's final states before the root."""
        key = id(prompt), len(output)
        if key not in self.known:
            states = read_whole(self.target, prompt, output)[0][-1]
            self.known[key] = (states[:, :-1], states, None)
        return self.known[key][0]

    def read_out(self, state: Tensor, head: int) -> Tensor:
        """[V] of a state [d]."""
        if self.head.config.own_lm_heads:
            matrix = self.head.lm_heads[head]  # type: ignore[index]
            return matrix(state)
        return self.target.head(state[None, None])[0, 0]


class NaiveHydra(NaiveMedusa):
    """Heads that also depend on the path, on one request."""

    def logits(self, prompt: dict[str, Any], output: list[int], path: Path) -> Tensor:
        """Return raw logits [V]. Head i reads the state and the embeddings of root and path."""
        states = self.states(prompt, output)
        if self.head.config.prefix_attention:
            places = torch.arange(states.shape[1])[None]
            states = self.head.decoder(inputs_embeds=states, position_ids=places).last_hidden_state
        tokens = torch.tensor([[output[-1], *path]])
        read = torch.cat([states[:, -1:], self.target.embed(tokens)], 1).flatten()
        mlp = self.head.mlps[len(path)]  # type: ignore[index]
        silu = torch.nn.functional.silu
        state = mlp.shortcut.weight @ read + mlp.shortcut.bias + silu(mlp.weight @ read + mlp.bias)
        for block in mlp.blocks:  # type: ignore[union-attr]
            state = state + silu(block.weight @ state + block.bias)
        return self.read_out(state, len(path))


class NaiveFlash(NaiveEagle):
    """A FLASH head on one request.

    Args:
        head, target, prompts, sampler: as of `NaiveEagle`.
        block: tokens of a pass.
    """

    def __init__(self, *given: Any, block: int) -> None:
        super().__init__(*given)
        self.block = block

    def logits(self, prompt: dict[str, Any], output: list[int], path: Path) -> Tensor:
        """[V] raw, of one prompt."""
        rows, _, _ = self.committed(prompt, output)
        drafted = self.target.embed(torch.tensor([path], dtype=torch.long)) if path else rows[:, :0]
        for start in range(0, len(path) - self.block + 1, self.block):
            predicted = self.head.predict(self.state(rows), self.block)
            stretch = drafted[:, start : start + self.block]
            rows = torch.cat([rows, self.head.fuse(stretch, predicted)], 1)
        offset = len(path) % self.block
        predicted = self.head.predict(self.state(rows), offset + 1)[:, offset]
        newest = path[-1] if path else output[-1]
        return (self.target.head(predicted) + self.head.bias(torch.tensor([newest])))[0]

    def state(self, rows: Tensor) -> Tensor:
        """[1, d] at the last row."""
        hidden: Tensor = self.head(rows, torch.arange(rows.shape[1])[None])
        return hidden[:, -1]

    def rows(
        self, prompt: dict[str, Any], taps: dict[int, Tensor], positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of prompt and output, images compressed."""
        spans = [find_images(self.target.config, prompt)]
        question = torch.tensor([prompt["input_ids"].shape[1] - 1])
        made = self.head.read_prompts(Prompts(taps[0], taps[-1], [taps[0].shape[1]], spans, question))
        return made.rows, positions, None
