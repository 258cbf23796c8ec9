"""The shape of a MAR, and the sizes that were published."""

from typing import NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

__all__ = ["SIZES", "MARConfig", "Size"]


class Size(NamedTuple):
    """Layers of encoder and decoder each, attention heads and width; depth and width of the head."""

    layers: int
    heads: int
    width: int
    head_depth: int
    head_width: int


#: The sizes of the paper (2406.11838), by the names of their folders.
SIZES = {
    "mar_base": Size(12, 12, 768, 6, 1024),
    "mar_large": Size(16, 16, 1024, 8, 1280),
    "mar_huge": Size(20, 16, 1280, 12, 1536),
}


@strict
class MARConfig(PreTrainedConfig):
    """The shape of a MAR.

    Attributes:
        hidden_size: D, of encoder and decoder.
        encoder_layers, decoder_layers: blocks of each.
        num_attention_heads: of a block.
        mlp_ratio: inner width of the feed-forward, as a multiple of D.
        token_size: numbers d of a token; the channels of a latent, which is one token.
        grid_size: tokens per side of the image, 16 for 256 pixels.
        buffer_size: tokens of the class before those of the image.
        num_classes: labels; `num_classes` itself is the null class.
        head_width, head_depth: of the diffusion head.
        scaling_factor: of the latents that it was trained on, where no autoencoder lies beside it.

    Example:
        >>> MARConfig.from_size("mar_large").hidden_size
        1024
    """

    model_type = "mar"

    hidden_size: int = 768
    encoder_layers: int = 12
    decoder_layers: int = 12
    num_attention_heads: int = 12
    mlp_ratio: float = 4.0
    token_size: int = 16
    grid_size: int = 16
    buffer_size: int = 64
    num_classes: int = 1000
    head_width: int = 1024
    head_depth: int = 6
    scaling_factor: float | None = None

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: got {self.hidden_size}; a multiple of the {self.num_attention_heads} heads"
            )

    @classmethod
    def from_size(cls, size: str) -> "MARConfig":
        """The config of a published size, by its name in `SIZES`."""
        layers, heads, width, head_depth, head_width = SIZES[size]
        return cls(
            hidden_size=width,
            encoder_layers=layers,
            decoder_layers=layers,
            num_attention_heads=heads,
            head_width=head_width,
            head_depth=head_depth,
        )

    @property
    def condition_type(self) -> str:
        """Kind of condition: "class", under the name that a LlamaGen's config has for it."""
        return "class"

    @property
    def image_tokens(self) -> int:
        """Tokens N of one image."""
        return self.grid_size**2
