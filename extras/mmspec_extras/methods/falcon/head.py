"""The head of Falcon (2412.12639): two LSTM layers, and a decoder layer whose blocks see themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mmspec.core.indexing import pick
from mmspec.heads.layers import LlamaLayerConfig, one_layer
from mmspec.heads.model import FeatureHead, Prompts
from mmspec.methods.flash.head import MAX_BLOCK
from mmspec.visual_tokens.splice import PromptRows

__all__ = ["LAYERS", "FalconConfig", "FalconHead"]

LAYERS = 2  # of the LSTM


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
        """Make pairs [B, n, 2d], which `run` makes rows of."""
        return torch.cat([embeddings, features], -1)

    def run(
        self, pairs: Tensor, state: Tensor | None = None, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the LSTM.

        Args:
            pairs: [N, n, 2d].
            state: [N, 2 LAYERS, d] before them; None for zeros.
            lengths: N numbers of pairs, the others being padding; None for n.

        Returns:
            The rows [N, n, d], and the state after the last pair of each.
        """
        given = None
        if state is not None:
            hidden, cell = state.transpose(0, 1).contiguous().split(LAYERS)
            given = hidden, cell
        if lengths is None:
            rows, after = self.lstm(pairs, given)
        else:
            packed = pack_padded_sequence(pairs, list(lengths), batch_first=True, enforce_sorted=False)
            packed_rows, after = self.lstm(packed, given)
            rows, _ = pad_packed_sequence(packed_rows, batch_first=True, total_length=pairs.shape[1])
        return rows, torch.cat(after).transpose(0, 1)

    def pairs(self, prompts: Prompts) -> Tensor:
        """[B, k - 2 + L, 2d] pairs of whole sequences."""
        blank = self.config.block - 2  # and the first token's, which no hidden state precedes
        before = pad(prompts.features[:, :-1], (0, 0, 1 + blank, 0))
        return self.fuse(pad(prompts.embeddings, (0, 0, blank, 0)), before)

    def read_prompts(self, prompts: Prompts) -> PromptRows:
        """Make the rows of whole prompts; `summary` [B, 2 LAYERS + k - 1, d] is what later rows need.

        This is the state of the LSTM, and the last k - 1 rows, which predict once the root is known.
        """
        lag = self.config.block - 1
        lengths = [length + lag - 1 for length in prompts.lengths]
        rows, state = self.run(self.pairs(prompts), None, lengths)
        slot = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
        ends = torch.tensor(lengths, device=rows.device)[:, None]
        last = ends - lag + torch.arange(lag, device=rows.device)
        source = (slot - lag + 1).where((slot >= lag - 1) & (slot < ends), -1)
        return PromptRows(rows, lengths, source, slot, torch.cat([state, pick(rows, last)], 1))
