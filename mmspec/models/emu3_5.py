"""Emu3.5 (Cui et al., 2510.26583): Qwen3's decoder, with image tokens in its vocabulary.

Importing it makes the auto classes of transformers know the published folders, whose `model_type` is "Emu3",
without their remote code. Tested on a small random checkpoint with their config and keys, not on published
weights. Their text tokenizer is remote code, which the user must allow or convert.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

__all__ = ["Emu3p5Config", "Emu3p5ForCausalLM", "Emu3p5Model"]


class Emu3p5Config(Qwen3Config):
    """Config of an Emu3.5: that of Qwen3, and the ids of the tokens around an image."""

    model_type = "Emu3"

    def __init__(
        self,
        eol_token_id: int = 151846,
        img_token_id: int = 151851,
        boi_token_id: int = 151852,
        eoi_token_id: int = 151853,
        **settings: Any,
    ) -> None:
        self.eol_token_id = eol_token_id
        self.img_token_id = img_token_id
        self.boi_token_id = boi_token_id
        self.eoi_token_id = eoi_token_id
        super().__init__(**settings)


class Emu3p5Model(Qwen3Model):
    """The layers of Emu3.5 without its head, of which drafting heads take copies."""

    config_class = Emu3p5Config


class Emu3p5ForCausalLM(Qwen3ForCausalLM):
    """Emu3.5 with its head, module for module Qwen3."""

    config_class = Emu3p5Config


AutoConfig.register(Emu3p5Config.model_type, Emu3p5Config, exist_ok=True)
AutoModel.register(Emu3p5Config, Emu3p5Model, exist_ok=True)
AutoModelForCausalLM.register(Emu3p5Config, Emu3p5ForCausalLM, exist_ok=True)
