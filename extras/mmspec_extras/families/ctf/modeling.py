"""CTF (2503.16194): a LlamaGen of coarse tokens, and a refiner of all fine tokens in one forward pass.

Similar entries of the codebook share one coarse token. Coarse tokens are drawn in raster order. Then a
network in which all cells see each other predicts the entry of each cell within its cluster. The authors
published no code and no weights; the layout is this package's own.
"""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import (
    LlamaGenDecoderLayer,
    LlamaGenForCausalLM,
    LlamaGenModel,
    raster_rotation,
)


@strict
class CTFConfig(LlamaGenConfig):
    """Config of a LlamaGen of coarse tokens with its refiner (CTF, 2503.16194).

    Attributes:
        vocab_size: number K of coarse tokens, the clusters of the codebook.
        codebook_size: number V of entries of the image tokenizer.
        refiner_layers: number of layers of the refiner, each as wide as a layer of the model.
    """

    model_type = "ctf"

    codebook_size: int = 16384
    refiner_layers: int = 12

    def validate_clusters(self) -> None:
        """Raise ValueError for more clusters than entries; called by `strict`."""
        if not 1 <= self.vocab_size <= self.codebook_size:
            rule = f"must be between 1 and {self.codebook_size}, the entries of the codebook"
            raise ValueError(f"vocab_size {rule}; got {self.vocab_size}")


class CTFRefiner(nn.Module):
    """Predicts the fine tokens of an image from all its coarse tokens.

    Attributes:
        cluster_of: [V] the coarse token of each entry of the codebook.
    """

    cluster_of: Tensor

    def __init__(self, config: CTFConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [LlamaGenDecoderLayer(config, index) for index in range(config.refiner_layers)]
        for layer in layers:
            layer.self_attn.is_causal = False
        self.layers = nn.ModuleList(layers)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.codebook_size, bias=False)
        self.register_buffer("cluster_of", torch.arange(config.codebook_size) % config.vocab_size)

    def forward(self, coarse: Tensor) -> Tensor:
        """Return logits [B, N, V] of fine tokens from coarse tokens [B, N]; -inf outside each cluster."""
        states = self.embed_tokens(coarse)
        places = self.config.prefix_length + torch.arange(coarse.shape[1], device=coarse.device)
        precise = torch.promote_types(states.dtype, torch.float32)
        cos, sin = raster_rotation(places[None], self.config)
        for layer in self.layers:
            states = layer(states, position_embeddings=(cos.to(precise), sin.to(precise)))
        logits: Tensor = self.lm_head(self.norm(states)).float()
        return logits.masked_fill(self.cluster_of != coarse[..., None], -torch.inf)


class CTFModel(LlamaGenModel):
    """LlamaGen's transformer over coarse tokens, without head and refiner."""

    config: CTFConfig
    config_class = CTFConfig


class CTFForCausalLM(LlamaGenForCausalLM):
    """LlamaGen over coarse tokens; `refiner` maps them to tokens of the image tokenizer.

    Example:
        >>> shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "refiner_layers": 1}
        >>> model = CTFForCausalLM(CTFConfig(vocab_size=8, codebook_size=64, **shape)).eval()
        >>> model.refiner(torch.zeros(1, 256, dtype=torch.long)).shape
        torch.Size([1, 256, 64])
    """

    config: CTFConfig
    config_class = CTFConfig
    decoder_class = CTFModel

    def __init__(self, config: CTFConfig) -> None:
        super().__init__(config)
        self.refiner = CTFRefiner(config)
        self.post_init()
