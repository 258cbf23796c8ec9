"""Output matrix of a draft model that is restricted to frequent tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from mmspec.errors import CheckpointError
from mmspec.models.weights import is_plain_linear

__all__ = ["FrequentLinear", "draft_tokens_of", "restrict_output"]


class FrequentLinear(nn.Linear):
    """Logits of some tokens from their rows of an output matrix; those of other tokens are -inf.

    With a large vocabulary, the output matrix is most of the weights that a small model reads for a token
    (FR-Spec, 2502.14856).

    Args:
        whole: the output matrix [V, d], whose weights are shared.
        tokens: [V'] tokens that have logits.
    """

    tokens: Tensor

    def __init__(self, whole: nn.Linear, tokens: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight, self.bias = whole.weight, whole.bias
        self.register_buffer("tokens", tokens.to(whole.weight.device), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """States [.., d] -> logits [.., V]."""
        bias = None if self.bias is None else self.bias[self.tokens]
        said = linear(hidden, self.weight[self.tokens], bias)
        logits = said.new_full((*said.shape[:-1], self.out_features), float("-inf"))
        return logits.index_copy(-1, self.tokens, said)


def draft_tokens_of(model: PreTrainedModel) -> Tensor | None:
    """Return the tokens [V'] that a model's config lists for drafting, ascending; None for all.

    Raises:
        CheckpointError: they are not tokens of its vocabulary.
    """
    said: Any = getattr(model.config, "draft_tokens", None)
    if said is None:
        return None
    size = model.config.get_text_config(decoder=True).vocab_size
    fits = isinstance(said, list) and said and all(type(each) is int and 0 <= each < size for each in said)
    if not fits or len(set(said)) < len(said):
        rule = f"must be a list of different tokens below {size}, or absent"
        raise CheckpointError("draft_tokens", f"{said!r}"[:60], rule)
    return torch.tensor(sorted(said), device="cpu")


def restrict_output(model: PreTrainedModel) -> None:
    """Restrict a draft model's logits to the tokens that its config lists, if any.

    An output matrix that is not a plain one, as in quantised models, still computes all logits.
    """
    tokens = draft_tokens_of(model)
    if tokens is None:
        return
    output: Any = model.get_output_embeddings()
    if is_plain_linear(output):  # a restricted one is not
        model.set_output_embeddings(FrequentLinear(output, tokens))
