"""The transformer of NFIG (2503.07076): VAR's, with frequency bands instead of scales."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict

from mmspec.families.var.modeling import VARConfig, VARForCausalLM, VARModel
from mmspec_extras.families.nfig.tokenizer import band_edges

__all__ = ["NFIGConfig", "NFIGForCausalLM", "NFIGModel"]


@strict
class NFIGConfig(VARConfig):
    """Config of a model that predicts an image by frequency bands, low ones first (NFIG, 2503.07076).

    The transformer is VAR's. Its scales are bands, which its image tokenizer quantises one after another.
    """

    model_type = "nfig"

    def band_edges(self) -> list[float]:
        """Return the upper edge of each band as a share of the largest frequency: its share of the tokens."""
        return band_edges(self.patch_nums)


class NFIGModel(VARModel):
    """VAR's transformer, with NFIG's config."""

    config: NFIGConfig
    config_class = NFIGConfig


class NFIGForCausalLM(VARForCausalLM):
    """NFIG: predicts the tokens of a frequency band, given a class and all lower bands."""

    config: NFIGConfig
    config_class = NFIGConfig
    decoder_class = NFIGModel
