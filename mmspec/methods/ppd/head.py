"""Trained prompt tokens of PPD (2405.18628): embeddings, which are the only trained weights.

After any token of a text they are query nodes of the target's own forward pass, read by its output matrix.
"""

from __future__ import annotations

from dataclasses import field

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from mmspec.heads.configuration import MAX_HEADS, SizedHeadConfig
from mmspec.heads.model import DraftingHead

__all__ = ["PromptTokens", "PromptTokensConfig"]

UNMEASURED = 0.5  # accuracy of a level without measured ranks
RANKS = 4  # candidates of a level that a tree is likely to have


@strict
class PromptTokensConfig(SizedHeadConfig):
    """Config of prompt tokens.

    Attributes:
        top_k: see `HeadConfig`.
        num_probes: n, number of prompt tokens; the tree is as deep.
        hit_rates: by prompt token and rank, how often the target's own token had that rank; measured at the
            end of the training.
    """

    model_type = "mmspec_ppd"

    top_k: int = 16  # wider than other trees, as the few levels are uncertain
    num_probes: int = 3
    hit_rates: list[list[float]] = field(default_factory=list)

    @property
    def reads_targets_matrix(self) -> bool:
        return False  # the target itself computes their logits, for all tokens

    @property
    def depth(self) -> int:
        """Depth of the default tree."""
        return self.num_probes

    @property
    def worth(self) -> list[float]:
        """Tokens that each prompt token adds to the next round, given those before it."""
        rates = [sum(ranks[:RANKS]) for ranks in self.hit_rates] or [UNMEASURED] * self.num_probes
        return torch.tensor(rates, dtype=torch.float32, device="cpu").cumprod(0).tolist()

    def validate_architecture(self) -> None:
        """Raise ValueError for settings that cannot be built; called by `strict`."""
        if not 1 <= self.num_probes <= MAX_HEADS:
            raise ValueError(f"num_probes must be from 1 to {MAX_HEADS}; got {self.num_probes}")


class PromptTokens(DraftingHead):
    """Embeddings of n prompt tokens (PPD, 2405.18628).

    After a token at t, and after each other, they have positions t + 1 ... t + n; the target's logits at the
    j-th (from 1) predict token t + 1 + j. Token t + 1 is the target's own.

    Attributes:
        embeddings: [n, d].
    """

    config: PromptTokensConfig
    config_class = PromptTokensConfig
    base_model_prefix = "ppd"

    def __init__(self, config: PromptTokensConfig) -> None:
        super().__init__(config)
        size = config.num_probes, config.hidden_size
        self.embeddings = nn.Parameter(torch.randn(size) * config.initializer_range)
        self.post_init()

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def forward(self) -> Tensor:
        """The embeddings [n, d]."""
        return self.embeddings
