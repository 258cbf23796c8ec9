"""Configs of drafting heads: the target that each was trained for, and its default tree."""

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
SHALLOWEST = 7  # fewest layers of a target for which the published taps differ


@strict
class HeadConfig(PreTrainedConfig):
    """Config of a drafting head.

    Attributes:
        vocabulary: tokens of the target, which for an image model are its codes and syntax alone.
        target_layers: layers of the target's language model, which distinguish models of one family and
            width; 0 where a published checkpoint does not state them.
        num_draft_tokens, top_k: the default dynamic tree.
        frequent_tokens: number of tokens that it drafts, the most frequent of the training, so that it reads
            their rows of the target's output matrix alone (FR-Spec, 2502.14856); 0 for all.
    """

    vocabulary: int = 0
    target_layers: int = 0
    frequent_tokens: int = 0
    num_draft_tokens: int = 24
    top_k: int = 8
    initializer_range: float = 0.02

    @property
    def reads_targets_matrix(self) -> bool:
        """Whether the target's output matrix reads its states, so that some of its rows can be chosen."""
        return True

    @property
    def draft_size(self) -> int:
        """Number of the tokens that it drafts; 0 for all tokens of the target."""
        return self.frequent_tokens

    def validate_frequent_tokens(self) -> None:
        """Raise ValueError for too many tokens, or without the target's output matrix; called by `strict`."""
        asked, most = self.frequent_tokens, self.vocabulary
        if asked and not self.reads_targets_matrix:
            rule = "must be 0: this head does not read the target's output matrix"
            raise ValueError(f"frequent_tokens {rule}; got {asked}")
        if asked < 0 or most and asked > most:
            raise ValueError(f"frequent_tokens must be from 0 (all) to {most}, the vocabulary; got {asked}")

    @classmethod
    def for_target(cls, config: PreTrainedConfig, vocabulary: int, **settings: object) -> Self:
        """Make the config of a head for a target.

        Args:
            config: of the target.
            vocabulary: tokens of the target.
            settings: attributes of this class that replace those derived from the target.

        Raises:
            UnsupportedModelError: the head needs a layer of the target's family, which mmspec cannot build.
        """
        return cls(**cls.sizes_for(config.get_text_config(decoder=True), vocabulary) | settings)

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        """Return the attributes that follow from the config of the target's language model."""
        return {"vocabulary": vocabulary, "target_layers": int(text.num_hidden_layers)}


@strict
class SizedHeadConfig(HeadConfig):
    """Config of a head whose layers are independent of the target's family."""

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
        taps: hidden states of the target that it reads: k for the input of layer k, -1 for the final one.
        guided: whether it was trained under classifier-free guidance.
        window: default of decoding.
        columns: cells in a row of the images of its training; 0 if unknown.
        codebook: the first numbers of the target's codebook, which identify it; empty if unknown.
    """

    taps: list[int] = field(default_factory=lambda: [-1])
    guided: bool = True
    window: int = 32
    columns: int = 0
    codebook: list[float] = field(default_factory=list)
    rms_norm_eps: float = 1e-5

    @property
    def reads_targets_matrix(self) -> bool:
        return False  # it corrects the target's logits of all tokens

    def validate_taps(self) -> None:
        """Raise ValueError for layers that the target does not have; called by `strict`."""
        check_taps(self.taps, self.target_layers)


@strict
class LevelHeadsConfig(SizedHeadConfig):
    """Config of heads that each predict one level of the tree, which is as deep as there are heads.

    Attributes:
        num_heads: tokens predicted beyond the root.
        own_lm_heads: whether each head has its own output matrix [V, d], as published ones do, which takes
            0.5 GB a head at 7 B; otherwise all use the target's.
        hit_rates: by head and rank, how often the target's own token had that rank; measured at the end of
            the training, for static trees.
    """

    least_layers = 0  # not a field: a lower bound of each kind

    num_heads: int = 4
    num_layers: int = 1
    own_lm_heads: bool = False
    hit_rates: list[list[float]] = field(default_factory=list)

    @property
    def reads_targets_matrix(self) -> bool:
        return not self.own_lm_heads

    def validate_architecture(self) -> None:
        """Raise ValueError for settings that cannot be built; called by `strict`."""
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads must be from 1 to {MAX_HEADS}; got {self.num_heads}")
        if self.num_layers < self.least_layers:
            raise ValueError(f"num_layers must be at least {self.least_layers}; got {self.num_layers}")

    @property
    def depth(self) -> int:
        """Depth of the default tree."""
        return self.num_heads


def check_taps(taps: list[int], layers: int) -> None:
    """Raise ValueError unless there are taps, and a target of `layers` layers has them; 0 for any target."""
    deepest = layers - 1 if layers else max(taps, default=0)
    if not taps or any(not -1 <= tap <= deepest for tap in taps):
        raise ValueError(f"taps must be from -1 to {deepest}; got {taps}")


def three_taps(layers: int) -> list[int]:
    """Return the taps of a target of L layers: the inputs of layers 2, L // 2 and L - 3, as published.

    Where these are not three (fewer than 7 layers), the inputs of the last three layers. The final state is
    never one of them, as engines that serve such heads cannot provide it.
    """
    return [2, layers // 2, layers - 3] if layers >= SHALLOWEST else [*range(layers)][-3:]
