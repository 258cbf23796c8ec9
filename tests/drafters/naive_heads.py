"""What Medusa's and Hydra's heads should propose, the slow way: no cache, no batch, one path at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.drafters.naive_eagle import NaiveEagle, Path, read_whole


class NaiveMedusa(NaiveEagle):
    """The heads on one request."""

    def logits(self, prompt: dict[str, Any], output: list[int], path: Path) -> Tensor:
        """[V] raw: head i knows nothing of the path but its length."""
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
    """The same, told of the path."""

    def logits(self, prompt: dict[str, Any], output: list[int], path: Path) -> Tensor:
        """[V] raw: head i reads the state and the embeddings of root and path."""
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
