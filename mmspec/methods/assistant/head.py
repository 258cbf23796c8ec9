"""Assistants of Gemma 4: small models without keys and values, which attend to those of their target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified_assistant import Gemma4UnifiedAssistantForCausalLM

from mmspec.errors import CheckpointError
from mmspec.heads.configuration import HeadConfig
from mmspec.heads.model import DraftingHead
from mmspec.models.official_files import read_config

__all__ = ["AssistantHead", "AssistantHeadConfig", "all_shared", "read_official"]

CLASSES: dict[str, Any] = {
    "gemma4_assistant": Gemma4AssistantForCausalLM,
    "gemma4_unified_assistant": Gemma4UnifiedAssistantForCausalLM,
}


@strict
class AssistantHeadConfig(HeadConfig):
    """Config of an assistant as a head."""

    model_type = "mmspec_assistant"

    hidden_size: int = 0
    target_type: str = ""
    depth: int = 5


class AssistantHead(DraftingHead):
    """An assistant of transformers that reads the keys and values of two layers of its target."""

    config: AssistantHeadConfig
    config_class = AssistantHeadConfig

    def __init__(self, config: AssistantHeadConfig, assistant: nn.Module | None = None) -> None:
        super().__init__(config)
        if not isinstance(assistant, tuple(CLASSES.values())):
            raise CheckpointError("drafter", type(assistant).__name__, "must be an assistant of Gemma 4")
        self.assistant: Any = assistant

    @classmethod
    def adopt(cls, assistant: PreTrainedModel) -> AssistantHead:
        """Return a head that runs a loaded assistant."""
        if not isinstance(assistant, tuple(CLASSES.values())):
            raise CheckpointError("drafter", type(assistant).__name__, "must be an assistant of Gemma 4")
        config: Any = assistant.config
        text = config.get_text_config()
        made = AssistantHeadConfig(
            vocabulary=int(text.vocab_size),
            hidden_size=int(config.backbone_hidden_size),
            target_type=str(text.model_type),
        )
        return cls(made, assistant)

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        states: dict[str, tuple[Tensor, Tensor]],
        masks: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Predict the token after each of n independent nodes.

        Args:
            embeddings: [B, n, d] of their tokens, as inputs of the target's first layer.
            hidden: [B, n, d] the target's final state before each, or the assistant's own.
            positions: [B, n]; the position of the newest committed token for all drafted ones.
            states: keys and values [B, heads, length, head_dim] of the target by kind of layer.
            masks: which of them are visible, [B, 1, n, length].

        Returns:
            [B, n, V] logits; [B, n, d] states to feed back.
        """
        assistant = self.assistant
        output = assistant.model(
            inputs_embeds=assistant.pre_projection(torch.cat([embeddings, hidden], -1)),
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=states,
            use_cache=False,
            # a number would make transformers drop all nodes but the last, and fail
            logits_to_keep=torch.arange(positions.shape[1], device=positions.device),
        )
        last = output.last_hidden_state
        if assistant.config.use_ordered_embeddings:
            logits: Tensor = assistant.masked_embedding(last, assistant.lm_head.weight)
        else:
            logits = assistant.lm_head(last)
        return logits, assistant.post_projection(last)


def all_shared(config: Any) -> Any:
    """Return the config of an assistant, marked so that all layers read another model's keys and values.

    transformers 5.23 looks for layers of its own that keep them, and raises an error if there are none.
    """
    text = config.get_text_config()
    kind, modes = type(text), property(lambda self: ["reuse"] * self.num_hidden_layers)
    text.__class__ = type(kind.__name__, (kind,), {"kv_sharing_modes": modes})  # auto classes use the name
    return config


def read_official(folder: Path, target: PreTrainedConfig) -> AssistantHead | None:
    """Load the assistant in a folder, as Google publishes it; None if the folder has none."""
    if not (folder / "config.json").is_file():
        return None
    kind = CLASSES.get(str(read_config(folder).get("model_type")))
    if kind is None:
        return None
    try:
        config = all_shared(kind.config_class.from_pretrained(folder))
        return AssistantHead.adopt(kind.from_pretrained(folder, config=config))
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError("drafter", str(folder), f"must be a complete assistant ({error})") from error
