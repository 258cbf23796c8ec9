"""Configs of drafting heads: what each remembers of its target, and the tree that it grows."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

__all__ = ["HeadConfig", "SizedHeadConfig", "WindowHeadConfig"]


@strict
class HeadConfig(PreTrainedConfig):
    """Config of a drafting head.

    Attributes:
        vocabulary: tokens that the target knows, which for an image are its codes and syntax alone.
        target_layers: layers of the target's language model, which tells models of one family and width
            apart; 0 where a published checkpoint does not say.
        num_draft_tokens, top_k: the dynamic tree that is grown where nothing else is asked for.
    """

    vocabulary: int = 0
    target_layers: int = 0
    num_draft_tokens: int = 24
    top_k: int = 8
    initializer_range: float = 0.02

    @classmethod
    def for_target(cls, config: PreTrainedConfig, vocabulary: int, **settings: Any) -> Self:
        """Make the config of a head for a target.

        Args:
            config: of the target.
            vocabulary: tokens that it knows.
            settings: attributes of this class that are to differ from what suits the target.

        Raises:
            UnsupportedModelError: the head needs a layer of the target's family, which mmspec does not know.
        """
        return cls(**cls.sizes_for(config.get_text_config(decoder=True), vocabulary) | settings)

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes that follow from the config of the target's language model."""
        return {"vocabulary": vocabulary, "target_layers": int(text.num_hidden_layers)}


@strict
class SizedHeadConfig(HeadConfig):
    """Config of a head whose parts are of no family of models.

    Attributes:
        target_type: model type of the target's language model; "" where a published checkpoint does not say.
        hidden_size: of the target.
    """

    target_type: str = ""
    hidden_size: int = 4096

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        sizes = {"target_type": text.model_type, "hidden_size": int(text.hidden_size)}
        return super().sizes_for(text, vocabulary) | sizes


@strict
class WindowHeadConfig(SizedHeadConfig):
    """Config of a head that reads the target's hidden states in a Jacobi window.

    Attributes:
        taps: hidden states of the target that it reads: k for what enters layer k, -1 for the final one.
        guided: whether it was trained under classifier-free guidance.
        window: of decoding, where nothing else is asked for.
        columns: cells in a row of the images that it learnt; 0 where nothing says so.
        codebook: the first numbers of the target's codebook, which tell codebooks apart; likewise.
    """

    taps: list[int] = field(default_factory=lambda: [-1])
    guided: bool = True
    window: int = 32
    columns: int = 0
    codebook: list[float] = field(default_factory=list)
    rms_norm_eps: float = 1e-5

    def validate_taps(self) -> None:
        """Refuse layers that the target does not have; called by `strict`."""
        deepest = self.target_layers - 1 if self.target_layers else max(self.taps, default=0)
        if not self.taps or any(not -1 <= tap <= deepest for tap in self.taps):
            raise ValueError(f"taps: got {self.taps}; from -1 to {deepest}")
