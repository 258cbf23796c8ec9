"""Nested exits (S2D, 2407.01955): maps beside the first layers of a target, shared by all exits."""

from __future__ import annotations

from dataclasses import field

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.open_types import Keywords
from mmspec_extras.methods.early_exit.adapters import Adapters, AdaptersConfig


@strict
class SortedExitsConfig(AdaptersConfig):
    """Config of nested exits.

    Attributes:
        exits: numbers of layers after which a token can leave, ascending.
    """

    model_type = "mmspec_s2d"

    exits: list[int] = field(default_factory=lambda: [1])

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        layers = int(text.num_hidden_layers)
        exits = sorted({max(1, layers * part // 6) for part in (1, 2, 3)})
        return super().sizes_for(text, vocabulary) | {"exits": exits}

    def validate_exits(self) -> None:
        """Raise ValueError for exits that the target does not have; called by `strict`."""
        exits, most = self.exits, self.target_layers
        if not exits or exits != sorted(set(exits)) or exits[0] < 1 or most and exits[-1] > most:
            raise ValueError(f"exits must ascend, and be from 1 to {most}, the layers; got {exits}")


class SortedExits(Adapters):
    """The maps of all exits; a deeper exit begins with those of the exits before it."""

    config: SortedExitsConfig
    config_class = SortedExitsConfig
    base_model_prefix = "s2d"

    def __init__(self, config: SortedExitsConfig) -> None:
        super().__init__(config, config.exits[-1])
