"""The transformer of NFIG (2503.07076): VAR's, with frequency bands instead of scales."""

from __future__ import annotations

from itertools import accumulate

from huggingface_hub.dataclasses import strict

from mmspec.families.var.modeling import VARConfig, VARForCausalLM, VARModel

__all__ = ["NFIGConfig", "NFIGForCausalLM", "NFIGModel"]


@strict
class NFIGConfig(VARConfig):
    """Config of a model that predicts an image by frequency bands, low ones first (NFIG, 2503.07076).

    The transformer is VAR's. Its scales are bands, which NFIG's image tokenizer quantises one after another.
    The encoder of that tokenizer, which splits an image into bands, is not included; images are decoded from
    codes as in VAR.
    """

    model_type = "nfig"

    def band_edges(self) -> list[float]:
        """Return the upper edge of each band as a share of the largest frequency: its share of the tokens."""
        return [count / self.image_tokens for count in accumulate(side**2 for side in self.patch_nums)]


class NFIGModel(VARModel):
    """VAR's transformer, with NFIG's config."""

    config: NFIGConfig
    config_class = NFIGConfig


class NFIGForCausalLM(VARForCausalLM):
    """NFIG: predicts the tokens of a frequency band, given a class and all lower bands."""

    config: NFIGConfig
    config_class = NFIGConfig
    decoder_class = NFIGModel
