"""Emu3.5 (Cui et al., 2510.26583): Qwen3's decoder, with image tokens in its vocabulary.

Importing this module registers the published folders, whose `model_type` is "Emu3", with the auto classes of
transformers, without their remote code. Tested on a small random checkpoint with their config and keys, not
on published weights. Their text tokenizer is remote code, which you must allow or convert.
"""

from __future__ import annotations

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
    """Config of Emu3.5: Qwen3's, with the ids of the tokens around an image."""

    model_type = "Emu3"

    eol_token_id: int = 151846  # end of a row of image tokens
    img_token_id: int = 151851  # last token before the image tokens
    boi_token_id: int = 151852  # begin of an image, before its size as text
    eoi_token_id: int = 151853  # replaces the end of the last row; the ids of the codes follow


class Emu3p5Model(Qwen3Model):
    """The layers of Emu3.5 without its output matrix; drafting heads copy some of them."""

    config_class = Emu3p5Config


class Emu3p5ForCausalLM(Qwen3ForCausalLM):
    """Emu3.5 with its output matrix; its modules are Qwen3's."""

    config: Emu3p5Config
    config_class = Emu3p5Config


AutoConfig.register(Emu3p5Config.model_type, Emu3p5Config, exist_ok=True)
AutoModel.register(Emu3p5Config, Emu3p5Model, exist_ok=True)
AutoModelForCausalLM.register(Emu3p5Config, Emu3p5ForCausalLM, exist_ok=True)
