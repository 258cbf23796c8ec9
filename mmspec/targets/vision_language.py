"""Target adapter for multimodal models of transformers: LLaVA, Qwen-VL, SmolVLM, Qwen-Omni and others.

The processor has already expanded each image and sound into its placeholder ids, so that a prompt is
processed like text; pixels and spectrograms are needed once, in the prefill. Families differ in how they
count positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.errors import InputError
from mmspec.plugins import family_of, load
from mmspec.registry import did_you_mean
from mmspec.targets.causal import CausalTarget
from mmspec.targets.encoder_decoder import EncoderDecoderTarget

M_ROPE_AXES = 3
AUTOREGRESSIVE = "autoregressive"
MODES = ("blocks", AUTOREGRESSIVE)


class VisionLanguageTarget(CausalTarget):
    """Adapter from a transformers image-text-to-text model to the `Target` interface.

    Args:
        model: any `AutoModelForImageTextToText` model whose language model is decoder-only.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._rope_index = getattr(model.model, "get_rope_index", None)

    def positions(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Position ids of a prompt, and the offset of the positions that follow it.

        M-RoPE models count an image by its grid, not by its tokens (Qwen2-VL, 2409.12191, section 2.1). The
        offset belongs to the request: the corresponding attribute of the module is never read, because other
        requests change it.

        Args:
            inputs: the prompt's tensors; given `position_ids` [3 or 4, 1, L] are used unchanged.

        Returns:
            [1, L], or [3, 1, L] for M-RoPE; and the next position minus L.

        Raises:
            InputError: an M-RoPE prompt with images lacks `mm_token_type_ids`.
        """
        given = inputs.get("position_ids")
        if given is not None:
            axes = given[-M_ROPE_AXES:]  # transformers may prepend the text's own positions
            return given, int(axes.max()) + 1 - given.shape[-1]
        grids = [name for name in ("image_grid_thw", "video_grid_thw") if inputs.get(name) is not None]
        if self._rope_index is None or not grids:
            return super().positions(inputs)
        accepted = inspect.signature(self._rope_index).parameters
        if "mm_token_type_ids" in accepted and inputs.get("mm_token_type_ids") is None:
            raise InputError(
                "inputs",
                sorted(inputs),
                "must have `mm_token_type_ids` (0 text, 1 image, 2 video) for a prompt with images, as "
                "returned by the processor; the positions would be wrong without it",
            )
        known = {**inputs, **renamed_for_positions(inputs)}
        arguments = {name: known[name] for name in accepted if name in known}
        positions, delta = self._rope_index(**arguments)
        return positions.to(torch.long), int(delta.reshape(()))


def renamed_for_positions(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs that `get_rope_index` takes under another name, as Qwen-Omni's does."""
    renamed = {}
    if inputs.get("feature_attention_mask") is not None:
        renamed["audio_seqlens"] = inputs["feature_attention_mask"].sum(-1)
    if inputs.get("video_second_per_grid") is not None:
        renamed["second_per_grids"] = inputs["video_second_per_grid"]
    return renamed


def check_mode(config: PreTrainedConfig, mode: str | None) -> None:
    """Check a decoding mode; None is the model's own.

    Raises:
        InputError: the mode is unknown, or the model was not trained for both modes.
    """
    if mode is None:
        return
    if mode not in MODES:
        raise InputError("mode", mode, did_you_mean(mode, MODES))
    text = config.get_text_config(decoder=True)
    is_both = getattr(text, "block_length", None) and getattr(text, "is_causal", False)
    if not is_both or getattr(text, "predicts", None) != "next":
        rule = "must be None: this model was not trained for both masked blocks and next-token prediction"
        raise InputError("mode", mode, rule)


def adapt(model: PreTrainedModel, mode: str | None = None) -> CausalTarget:
    """Build the `Target` adapter of a loaded model; for modes see `check_mode`."""
    check_mode(model.config, mode)
    family = family_of(model.config)
    if family is not None and not family.draws and mode != AUTOREGRESSIVE:
        target: CausalTarget = load(family.target)(model)
        return target
    if model.config.is_encoder_decoder:
        return EncoderDecoderTarget(model)
    has_vision = hasattr(model, "model") and hasattr(model.model, "get_image_features")
    return VisionLanguageTarget(model) if has_vision else CausalTarget(model)
