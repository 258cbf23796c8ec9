"""Causal transformer that reads words and vectors, and predicts a normal distribution of the next vector.

The shape of GIVT (2312.02116) with one component: no codebook, no softmax.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

__all__ = ["ContinuousConfig", "ContinuousForCausalLM"]


class ContinuousConfig(LlamaConfig):
    """Configuration of `ContinuousForCausalLM`: that of a Llama, with the size of its vectors."""

    model_type = "mmspec_continuous"
    latent_size: int = 16


class ContinuousForCausalLM(PreTrainedModel):
    """Llama decoder with a projection for vectors and a Gaussian head."""

    config_class = ContinuousConfig
    config: ContinuousConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: ContinuousConfig) -> None:
        super().__init__(config)
        self.model: LlamaModel = LlamaModel(config)
        self.read = nn.Linear(config.latent_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 2 * config.latent_size)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_decoder(self) -> Any:
        return self.model

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids [B, n] or vectors [B, n, d] for the first layer, [B, n, hidden]."""
        embedded: Tensor = (
            self.read(tokens) if tokens.is_floating_point() else self.model.embed_tokens(tokens)
        )
        return embedded

    def forward(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Mean and log deviation [B, n, 2 d] of the vector after each id [B, n] or vector [B, n, d]."""
        hidden = self.model(inputs_embeds=self.embed(tokens), **arguments).last_hidden_state
        parameters: Tensor = self.head(hidden)
        return parameters
