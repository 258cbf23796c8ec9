"""The transformer of NFIG (2503.07076): that of VAR, with bands of frequencies for scales."""

from __future__ import annotations

from itertools import accumulate

from huggingface_hub.dataclasses import strict

from mmspec.families.var.modeling import VARConfig, VARForCausalLM, VARModel

__all__ = ["NFIGConfig", "NFIGForCausalLM", "NFIGModel"]


@strict
class NFIGConfig(VARConfig):
    """The shape of a model that predicts an image by bands of frequency, low ones first (NFIG, 2503.07076).

    The transformer is VAR's; its scales are bands, which an image tokenizer of its own quantises one after
    another. That tokenizer's encoder, which parts an image into bands, is not here: images are drawn from its
    codes as from VAR's.
    """

    model_type = "nfig"

    def band_edges(self) -> list[float]:
        """Upper edge of each band, as a share of the largest frequency: as wide as it has tokens."""
        return [count / self.image_tokens for count in accumulate(side**2 for side in self.patch_nums)]


class NFIGModel(VARModel):
    """The transformer of an NFIG: VAR's."""

    config: NFIGConfig
    config_class = NFIGConfig


class NFIGForCausalLM(VARForCausalLM):
    """NFIG: the tokens of a band of frequencies, given a class and all lower bands."""

    config: NFIGConfig
    config_class = NFIGConfig
    decoder_class = NFIGModel
