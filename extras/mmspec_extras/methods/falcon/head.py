"""The head of Falcon (2412.12639): two LSTM layers, and a decoder layer whose blocks see themselves."""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mmspec.heads.layers import LlamaLayerConfig, one_layer
from mmspec.heads.model import FeatureHead, Prompts
from mmspec.methods.flash.head import MAX_BLOCK
from mmspec.visual_tokens.splice import PromptRows

LAYERS = 2  # of the LSTM
STATE = 2 * LAYERS  # vectors of its state


@strict
class FalconConfig(LlamaLayerConfig):
    """Config of a Falcon head, whose layer counts positions by itself.

    Attributes:
        block: k, tokens predicted in one forward pass.
        depth: levels of the default tree.
    """

    model_type = "mmspec_falcon"

    block: int = 2
    depth: int = 6

    def validate_block(self) -> None:
        """Raise ValueError for a block that cannot be drafted; called by `strict`."""
        if not 2 <= self.block <= MAX_BLOCK:
            raise ValueError(f"block must be from 2 to {MAX_BLOCK} tokens; got {self.block}")


class FalconHead(FeatureHead):
    """Predicts the hidden states of k tokens from the k pairs before them.

    A pair is the embedding of token t beside the target's final hidden state at t - 1. The LSTM makes a row
    of each pair. The rows of a block see each other and all rows before; the row of token t predicts the
    hidden state at t + k - 1, and so token t + k. k - 1 pairs of zeros stand before the first token, so that
    a block precedes every root.
    """

    config: FalconConfig
    config_class = FalconConfig
    base_model_prefix = "falcon"
    position_lag = None

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.lstm = nn.LSTM(2 * width, width, LAYERS, batch_first=True)
        self.decoder = one_layer(config)  # without norm: the imitated states are normed by the target
        self.post_init()

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """Make pairs [..., 2d], which `run` makes rows of."""
        return torch.cat([embeddings, features], -1)

    def run(self, pairs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the LSTM on pairs [N, n, 2d]; return the rows [N, n, d] and the state [N, STATE, d] after them.

        It starts from the given state, or from zeros.
        """
        given = None if state is None else state.transpose(0, 1).contiguous().chunk(2)
        rows, after = self.lstm(pairs, given)
        return rows, torch.cat(after).transpose(0, 1)

    def pairs(self, prompts: Prompts) -> Tensor:
        """[B, k - 2 + L, 2d] pairs of whole sequences."""
        blank = self.config.block - 2  # and the first token's, which no hidden state precedes
        before = pad(prompts.features[:, :-1], (0, 0, blank + 1, 0))
        return self.fuse(pad(prompts.embeddings, (0, 0, blank, 0)), before)

    def read_prompts(self, prompts: Prompts) -> PromptRows:
        """Make the rows of whole prompts.

        `summary` [B, STATE + k - 1, d] is the state of the LSTM after each, and its last k - 1 rows, which
        predict once the root is known.
        """
        lag = self.config.block - 1
        lengths = [length + lag - 1 for length in prompts.lengths]
        made = [
            self.run(row[None, :length]) for row, length in zip(self.pairs(prompts), lengths, strict=True)
        ]
        summary = torch.cat([torch.cat([state, rows[:, -lag:]], 1) for rows, state in made])
        rows = pad_sequence([rows[0] for rows, _ in made], batch_first=True)
        slot = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
        return PromptRows(rows, lengths, (slot - lag + 1).clamp_min(-1), slot, summary)
