"""Trained prompt tokens of PPD (2405.18628): embeddings, which are all that is learnt.

Behind any token of a text they are query nodes of the target's own forward, whose output matrix reads them.
"""

from __future__ import annotations

from dataclasses import field

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from mmspec.heads.configuration import MAX_HEADS, SizedHeadConfig
from mmspec.heads.model import DraftingHead

__all__ = ["PromptTokens", "PromptTokensConfig"]

UNMEASURED = 0.5  # how often a level is right whose ranks were not measured
RANKS = 4  # candidates of a level that a tree is likely to hold


@strict
class PromptTokensConfig(SizedHeadConfig):
    """Config of prompt tokens.

    Attributes:
        top_k: as of `HeadConfig`.
        num_probes: n, the prompt tokens; the tree is as deep.
        hit_rates: by prompt token and rank, how often the target's own token was found there; measured at the
            end of the training.
    """

    model_type = "mmspec_ppd"

    top_k: int = 16  # few levels, of which none is sure: wider than other trees
    num_probes: int = 3
    hit_rates: list[list[float]] = field(default_factory=list)

    @property
    def reads_targets_matrix(self) -> bool:
        return False  # the target reads them itself, for all tokens

    @property
    def depth(self) -> int:
        """Depth of the tree that is grown where nothing else is asked for."""
        return self.num_probes

    @property
    def worth(self) -> list[float]:
        """Tokens that each prompt token adds to the next round, if those before it are there."""
        rates = [sum(ranks[:RANKS]) for ranks in self.hit_rates] or [UNMEASURED] * self.num_probes
        return torch.tensor(rates, dtype=torch.float32, device="cpu").cumprod(0).tolist()

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 1 <= self.num_probes <= MAX_HEADS:
            raise ValueError(f"num_probes: got {self.num_probes}; 1 to {MAX_HEADS}")


class PromptTokens(DraftingHead):
    """Embeddings of n prompt tokens (PPD, 2405.18628).

    Behind a token at t, and behind each other, they stand at t + 1 ... t + n; the target's logits at the j-th
    (from 1) predict token t + 1 + j. Token t + 1 is the target's own.

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
