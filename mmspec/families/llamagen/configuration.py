"""Config of a LlamaGen transformer, and the published sizes."""

from typing import Any, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import Dinov2Config, PreTrainedConfig

from mmspec.open_types import Json
from mmspec.transformers_versions import CACHE_NAMES

__all__ = ["CONTROLLED_LAYERS", "RESIZES", "SIZES", "LlamaGenConfig", "Size", "swiglu_width"]


CONTROLLED_LAYERS = 3  # layers whose inputs get the control: 0, n / 3 and 2 n / 3 of n layers
RESIZES = ("nearest", "bicubic")


class Size(NamedTuple):
    """Depth and width of a published transformer."""

    layers: int
    heads: int
    width: int


#: The sizes of the paper (no weights of XXXL, 1B and 7B were published). All have as many kv heads as heads.
SIZES = {
    "B": Size(12, 12, 768),
    "L": Size(24, 16, 1024),
    "XL": Size(36, 20, 1280),
    "XXL": Size(48, 24, 1536),
    "3B": Size(24, 32, 3200),
    "XXXL": Size(48, 40, 2560),
    "1B": Size(22, 32, 2048),
    "7B": Size(32, 32, 4096),
}


def swiglu_width(width: int, multiple_of: int = 256, multiplier: float | None = None) -> int:
    """Hidden width of the feed-forward network: two thirds of four times the width, rounded up."""
    hidden = int(2 * (4 * width) / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return -(-hidden // multiple_of) * multiple_of


@strict
class LlamaGenConfig(PreTrainedConfig):
    """Config of a LlamaGen transformer.

    Attributes:
        vocab_size: entries V of the image codebook. Ids from V on are condition slots.
        intermediate_size: width of the SwiGLU; None computes it from `multiple_of` and `ffn_dim_multiplier`.
        num_key_value_heads: None for as many as attention heads, as in every published size.
        grid_size: image tokens per side g; 16, 24 or 32 for 256, 384 or 512 pixels. The rotation of a
            token depends on it, so that a checkpoint fits only the grid that it was trained for.
        condition_type: "class" (one slot holds a label) or "caption" (slots hold text features).
        num_classes: number of labels; one more row, `num_classes`, is the null class.
        caption_length, caption_dim: slots and width of the text features.
        rope_base: base of the rotary frequencies.
        control_config: config of the DINOv2 that encodes control images (ControlAR, 2410.02705); None for a
            model without control.
        control_resize: interpolation that resizes a control image to one patch per cell: "nearest" (published
            for Canny edges and segmentations) or "bicubic".

    Example:
        >>> LlamaGenConfig.from_size("XL", grid_size=24).intermediate_size
        3584
    """

    model_type = "llamagen"
    sub_configs = {"control_config": Dinov2Config}
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    frames = 1  # models of clips have it as a field

    vocab_size: int = 16384
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    hidden_act: str = "silu"
    mlp_bias: bool = False
    grid_size: int = 16
    condition_type: str = "class"
    num_classes: int = 1000
    caption_length: int = 120
    caption_dim: int = 2048
    rope_base: float = 10000.0
    control_config: Json | PreTrainedConfig | None = None
    control_resize: str = "bicubic"
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: object) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = swiglu_width(self.hidden_size, self.multiple_of, self.ffn_dim_multiplier)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if isinstance(self.control_config, dict):
            self.control_config = Dinov2Config(**self.control_config)
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Raise ValueError for impossible sizes; called by `strict`."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.condition_type not in ("class", "caption"):
            raise ValueError(f"condition_type must be 'class' or 'caption'; got {self.condition_type!r}")
        if self.hidden_size % heads:
            raise ValueError(f"hidden_size must be a multiple of the {heads} heads; got {self.hidden_size}")
        if heads % (groups or heads):
            raise ValueError(f"num_key_value_heads must be a divisor of the {heads} heads; got {groups}")
        if self.head_dim % 4:
            raise ValueError(
                "hidden_size / heads must be a multiple of 4, as rows and columns rotate half of the pairs; "
                f"got {self.head_dim}"
            )

    def validate_control(self) -> None:
        """Raise ValueError for control that such a model cannot have; called by `strict`."""
        if self.control_resize not in RESIZES:
            raise ValueError(f"control_resize must be 'nearest' or 'bicubic'; got {self.control_resize!r}")
        if self.control_config is None:
            return
        if self.model_type != "llamagen":
            raise ValueError(f"control_config must be None except for llamagen; got {self.control_config!r}")
        if self.num_hidden_layers % CONTROLLED_LAYERS:
            got = self.num_hidden_layers
            raise ValueError(f"num_hidden_layers must be a multiple of 3 for a model with control; got {got}")

    @classmethod
    def from_size(cls, size: str, **settings: Any) -> "LlamaGenConfig":
        """Return the config of a published size, by its name in `SIZES`."""
        layers, heads, width = SIZES[size]
        return cls(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, **settings)

    @property
    def attention_bias(self) -> bool:
        """Whether queries, keys, values and outputs of attention have biases: never in LlamaGen."""
        return False

    @property
    def head_dim(self) -> int:
        """Width of one attention head; 100 in the 3B, which kernels must pad."""
        return self.hidden_size // self.num_attention_heads

    @property
    def prefix_length(self) -> int:
        """Condition slots C before the image: one for a label, or those of a caption."""
        return 1 if self.condition_type == "class" else self.caption_length

    @property
    def image_tokens(self) -> int:
        """Tokens of an image, g * g."""
        return self.grid_size**2

    @property
    def max_position_embeddings(self) -> int:
        """Positions of prefix and image; drafts may reach positions beyond, which have no rotation."""
        return self.prefix_length + self.image_tokens
