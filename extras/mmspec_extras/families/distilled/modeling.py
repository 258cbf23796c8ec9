"""The student of Distilled Decoding (2412.17153): LlamaGen's transformer, whose queries read noise.

The authors published the code of inference alone. The layout is this package's own: queries are those of
LPD, to which a projection of the noise of their cell is added.
"""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from torch import Tensor

from mmspec.families.llamagen.control import two_layers
from mmspec.families.lpd.modeling import LPDConfig, LPDForCausalLM, LPDModel

__all__ = ["DistilledConfig", "DistilledForCausalLM", "DistilledModel"]


@strict
class DistilledConfig(LPDConfig):
    """Config of a student that draws an image in few forward passes (2412.17153).

    Attributes:
        noise_channels: width of the noise of a cell, that of the teacher's code vectors.
        generation_steps: forward passes per image in plain decoding.
    """

    model_type = "distilled"

    noise_channels: int = 8
    generation_steps: int | None = 2


class DistilledModel(LPDModel):
    """LPD's transformer, with a projection of noise."""

    config: DistilledConfig
    config_class = DistilledConfig

    def __init__(self, config: DistilledConfig) -> None:
        super().__init__(config)
        self.noise_projection = two_layers(config.noise_channels, config.hidden_size)
        self.post_init()

    def embed_noise(self, noise: Tensor) -> Tensor:
        """Return the queries [..., D] of noise [..., noise_channels]."""
        queries: Tensor = self.mask_token[0] + self.noise_projection(noise.to(self.mask_token.dtype))
        return queries


class DistilledForCausalLM(LPDForCausalLM):
    """Predicts the tokens of the cells whose noise it reads, given a condition and the tokens before them."""

    config: DistilledConfig
    model: DistilledModel
    config_class = DistilledConfig
    decoder_class = DistilledModel  # type: ignore[assignment]  # it takes the config above
