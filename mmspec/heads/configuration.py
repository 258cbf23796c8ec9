"""Configs of drafting heads: what each remembers of its target, and the tree that it grows."""

from __future__ import annotations

from dataclasses import field
from typing import Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.open_types import Keywords

__all__ = [
    "check_taps",
    "MAX_HEADS",
    "HeadConfig",
    "LevelHeadsConfig",
    "SizedHeadConfig",
    "WindowHeadConfig",
    "three_taps",
]

MAX_HEADS = 16
SHALLOWEST = 7  # layers of a target whose published taps differ


@strict
class HeadConfig(PreTrainedConfig):
    """Config of a drafting head.

    Attributes:
        vocabulary: tokens that the target knows, which for an image are its codes and syntax alone.
        target_layers: layers of the target's language model, which tells models of one family and width
            apart; 0 where a published checkpoint does not say.
        num_draft_tokens, top_k: the dynamic tree that is grown where nothing else is asked for.
        frequent_tokens: tokens that it drafts, those learnt most often, so that it reads their rows of the
            target's output matrix alone (FR-Spec, 2502.14856); 0 for all that the target knows.
    """

    vocabulary: int = 0
    target_layers: int = 0
    frequent_tokens: int = 0
    num_draft_tokens: int = 24
    top_k: int = 8
    initializer_range: float = 0.02

    @property
    def reads_targets_matrix(self) -> bool:
        """Whether its states are read out by the target's output matrix, so that rows of it can be chosen."""
        return True

    @property
    def draft_size(self) -> int:
        """Number of the tokens that it drafts; 0 for all that the target knows."""
        return self.frequent_tokens

    def validate_frequent_tokens(self) -> None:
        """Refuse more tokens than there are, or rows of a matrix that is not read; called by `strict`."""
        asked, most = self.frequent_tokens, self.vocabulary
        if asked and not self.reads_targets_matrix:
            raise ValueError(f"frequent_tokens: got {asked}; 0, as it reads no output matrix of the target's")
        if asked < 0 or most and asked > most:
            raise ValueError(f"frequent_tokens: got {asked}; 0 (all) to {most}, the vocabulary")

    @classmethod
    def for_target(cls, config: PreTrainedConfig, vocabulary: int, **settings: object) -> Self:
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
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        """Attributes that follow from the config of the target's language model."""
        return {"vocabulary": vocabulary, "target_layers": int(text.num_hidden_layers)}


@strict
class SizedHeadConfig(HeadConfig):
    """Config of a head whose parts are of no family of models."""

    target_type: str = ""
    hidden_size: int = 4096

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
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

    @property
    def reads_targets_matrix(self) -> bool:
        return False  # it corrects what the target says of all tokens

    def validate_taps(self) -> None:
        """Refuse layers that the target does not have; called by `strict`."""
        check_taps(self.taps, self.target_layers)


@strict
class LevelHeadsConfig(SizedHeadConfig):
    """Config of heads that each predict one level of the tree, which is as deep as there are heads.

    Attributes:
        num_heads: tokens predicted beyond the root.
        own_lm_heads: whether each head has an output matrix [V, d] of its own, as published ones do, which is
            0.5 GB a head at 7 B; else all use the target's.
        hit_rates: by head and rank, how often the target's own token was found there; measured at the end of
            the training, for static trees.
    """

    least_layers = 0  # no field: a bound that each kind has

    num_heads: int = 4
    num_layers: int = 1
    own_lm_heads: bool = False
    hit_rates: list[list[float]] = field(default_factory=list)

    @property
    def reads_targets_matrix(self) -> bool:
        return not self.own_lm_heads

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads: got {self.num_heads}; 1 to {MAX_HEADS}")
        if self.num_layers < self.least_layers:
            raise ValueError(f"num_layers: got {self.num_layers}; {self.least_layers} or more")

    @property
    def depth(self) -> int:
        """Depth of the tree that is grown where nothing else is asked for."""
        return self.num_heads


def check_taps(taps: list[int], layers: int) -> None:
    """Raise ValueError unless there are taps, and a target of so many layers has them; 0 layers for any."""
    deepest = layers - 1 if layers else max(taps, default=0)
    if not taps or any(not -1 <= tap <= deepest for tap in taps):
        raise ValueError(f"taps: got {taps}; from -1 to {deepest}")


def three_taps(layers: int) -> list[int]:
    """Taps of a target of L layers: what enters layers 2, L // 2 and L - 3, as published.

    Where these are not three (fewer than 7 layers), it is what enters the last three. The final state is not
    among them: engines that serve such heads cannot hand it over.
    """
    return [2, layers // 2, layers - 3] if layers >= SHALLOWEST else [*range(layers)][-3:]
