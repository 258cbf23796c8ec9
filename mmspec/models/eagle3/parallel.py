"""P-EAGLE: an EAGLE-3 head that predicts several tokens in one pass (speculators, SpecForge).

Behind the newest token stand rows of a mask: the embedding of a mask token, and hidden states that were
trained. Row i of them predicts the token i places further, whatever the tokens between will be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mmspec.errors import CheckpointError
from mmspec.models.eagle3.configuration import Eagle3Config
from mmspec.models.eagle3.modeling import Eagle3Head
from mmspec.models.published_layer import SLIDING

__all__ = ["MASK", "ParallelConfig", "ParallelHead", "first_layer_of", "parallel_config", "parallel_tensors"]

MASK, EMBEDDING = "mask_hidden", "embed_tokens.weight"
TOKEN = ("mask_token_id", "ptd_token_id", "pard_token")  # of speculators; of vLLM's reader
PREDICTIONS = 8  # of a pass, where nothing is said


@strict
class ParallelConfig(Eagle3Config):
    """Config of a P-EAGLE head.

    Attributes:
        num_layers: of the head; the first is EAGLE-3's, the others are Llama's.
        mask_token: whose embedding a row of the mask has.
        own_embedding: whether tokens are embedded by a matrix of its own.
        num_draft_tokens, depth, top_k: a chain of all that a pass was trained to predict, unless asked for.
    """

    model_type = "mmspec_peagle"

    num_layers: int = 1
    mask_token: int = 0
    own_embedding: bool = False
    num_draft_tokens: int = PREDICTIONS
    depth: int = PREDICTIONS
    top_k: int = 1

    def validate_mask(self) -> None:
        """Refuse a mask that is no token; called by `strict`."""
        if not 0 <= self.mask_token < max(self.vocabulary, 1):
            raise ValueError(f"mask_token: got {self.mask_token}; from 0 to {self.vocabulary - 1}")


class ParallelHead(Eagle3Head):
    """Predicts the next tokens, each from its own row, in one pass."""

    config: ParallelConfig
    config_class = ParallelConfig
    base_model_prefix = "peagle"

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        layer: Any = self.decoder.config
        layers: Any = self.decoder.layers
        attention: Any = type(layers[0].self_attn)
        for index in range(1, config.num_layers):
            added = LlamaDecoderLayer(layer, index)
            output = added.self_attn.o_proj
            added.self_attn = attention(layer, index)
            added.self_attn.o_proj = output
            layers.append(added)
        layer.num_hidden_layers = config.num_layers
        if config.sliding_window is not None:
            layer.layer_types = [SLIDING] * config.num_layers
        self.mask_hidden = nn.Parameter(torch.zeros(len(config.taps) * config.hidden_size))
        words = config.vocabulary, config.hidden_size
        self.embed_tokens = nn.Embedding(*words) if config.own_embedding else None
        self.post_init()

    def embed(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        return embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    @property
    def mask_feature(self) -> Tensor:
        """[d] what stands for the state of the token before, in rows of the mask."""
        return self.join(self.mask_hidden.chunk(len(self.config.taps)))


def first_layer_of(file: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """The config of an EAGLE-3 head of one layer in that of a P-EAGLE head.

    Raises:
        CheckpointError: some of its layers have windows, and others none.
    """
    nested = stored.get("transformer_layer_config")
    table = {**(stored if nested is None else nested), "num_hidden_layers": 1}
    types = table.get("layer_types") or []
    if len({*types}) > 1 or (not types and table.get("use_sliding_window")):
        allowed = "layer_types of one kind: layers of a P-EAGLE head that all have a window, or none"
        raise CheckpointError(f"{file}: layer_types", types, allowed)
    table["layer_types"] = types[:1] or None
    made = table if nested is None else {**stored, "transformer_layer_config": table}
    return {name: value for name, value in made.items() if name not in ("embed_requires_grad", *TOKEN)}


def parallel_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a P-EAGLE head by the names here."""
    made = {f"decoder.{name}" if name.startswith("layers.") else name: each for name, each in tensors.items()}
    return made | {MASK: tensors[MASK].flatten()}


def parallel_config(
    file: Path, config: Eagle3Config, stored: dict[str, Any], tensors: dict[str, Tensor]
) -> ParallelConfig:
    """The config of a P-EAGLE head.

    Args:
        file: for messages.
        config: of its first layer, as of an EAGLE-3 head.
        stored: its config.json.
        tensors: by the names here.

    Raises:
        CheckpointError: the config names no mask token, or none of the target's.
    """
    token = next((stored[name] for name in TOKEN if stored.get(name) is not None), None)
    if not isinstance(token, int) or not 0 <= token < config.vocabulary:
        allowed = f"the token whose embedding a mask has, from 0 to {config.vocabulary - 1}"
        raise CheckpointError(f"{file}: mask_token_id", token, allowed)
    methods = (stored.get("speculators_config") or {}).get("proposal_methods") or [{}]
    most = int(methods[0].get("speculative_tokens") or PREDICTIONS)
    known = config.to_dict()
    depths = {int(name.split(".")[2]) for name in tensors if name.startswith("decoder.layers.")}
    own = {"num_layers": 1 + max(depths), "mask_token": token, "own_embedding": EMBEDDING in tensors}
    shape = {"norm_feedback": False, "norm_logits": True, "num_draft_tokens": most, "depth": most, "top_k": 1}
    return ParallelConfig(**{**known, **own, **shape, "model_type": ParallelConfig.model_type})
