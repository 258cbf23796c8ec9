"""Target of LlamaGen (2406.06525), whose vocabulary has the codes alone, without syntax tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.core.draft import Nodes
from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import PromptOutput
from mmspec.core.rows import named
from mmspec.errors import InputError
from mmspec.families.llamagen.configuration import CONTROLLED_LAYERS, LlamaGenConfig
from mmspec.families.llamagen.modeling import (
    LlamaGenForCausalLM,
    class_prompt,
    encode_caption,
    null_caption_prompt,
)
from mmspec.open_types import Keywords, Processor
from mmspec.targets.batches import EMBEDDINGS
from mmspec.targets.causal import AnyState
from mmspec.targets.image_tokens import (
    AnyVQ,
    Asked,
    ImageState,
    ImageTokenTarget,
    PromptPair,
    TextEncoder,
    stride_of,
)

__all__ = ["CONTROL", "ControlledState", "LlamaGenTarget"]

CONTROL = "control"  # input of a prompt: [1, 3, N, D] vectors that are added to the tokens of its image
STRIDE = 16  # of the tokenizer of every published transformer
PUBLISHED = {
    "class": {"guidance_scale": 4.0, "top_k": 2000},
    "caption": {"guidance_scale": 7.5, "top_k": 1000},
}


@dataclass
class ControlledState(ImageState):
    """State of a batch with image control (ControlAR, 2410.02705).

    Attributes:
        control: [R, 3, N, D] vectors added to the token before each cell; 0 for unconditional prompts.
    """

    row_fields = named("control")

    control: Tensor = field(kw_only=True)


class LlamaGenTarget(ImageTokenTarget):
    """Adapter from a LlamaGen transformer to the Target interface.

    Args:
        model: a loaded model of classes or captions.
        vq: image tokenizer, a diffusers `VQModel` with a normalised codebook, as `mmspec convert` writes.
        codebook: [K, d] unnormalised code vectors, for rules that measure distances between them; None for
            those of `vq`.

    Raises:
        CheckpointError: tokenizer and transformer have codebooks of different sizes.
    """

    config: LlamaGenConfig
    model: LlamaGenForCausalLM
    only_size = "which this checkpoint was trained for"  # the rotation of a token depends on it

    def __init__(self, model: LlamaGenForCausalLM, vq: AnyVQ = None, codebook: Tensor | None = None) -> None:
        config = model.config
        stride = STRIDE if vq is None else stride_of(vq)
        rows, frames = config.frames * config.grid_size, config.frames
        grid = ImageGrid(rows, config.grid_size, config.vocab_size, frames=frames)
        super().__init__(model, grid, stride=stride, vq=vq, codebook=codebook)
        self.published = PUBLISHED[config.condition_type]
        self.is_controlled = model.control_encoder is not None  # ControlAR, 2410.02705
        self.classes = config.num_classes if config.condition_type == "class" else None

    def encode_prompt(
        self,
        asked: Asked,
        negative: str | None,
        grid: ImageGrid,
        tokenizer: Processor,
        text_encoder: TextEncoder = None,
    ) -> PromptPair:
        """Encode a label or a caption, and the null prompt: as many last rows as the caption has tokens.

        The official sampler masks both halves alike, so that only these rows of the null caption are seen.
        """
        if self.classes is not None:
            return class_prompt(self.config, [asked]), class_prompt(self.config, [None])
        if text_encoder is None:
            raise InputError("text_encoder", None, "must be the T5 encoder that the model was trained with")
        inputs = encode_caption(self.config, asked, tokenizer, text_encoder)
        if negative is not None:
            return inputs, encode_caption(self.config, negative, tokenizer, text_encoder)
        return inputs, null_caption_prompt(self.model, inputs["input_ids"].shape[1])

    @torch.no_grad()
    def encode_control(self, pixels: Tensor, strength: float = 1.0) -> dict[str, Tensor]:
        """Encode a control image [1, 3, H, W] in [-1, 1] to an input of a prompt, times the strength.

        Raises:
            InputError: the model is not controlled by an image.
        """
        if self.model.control_encoder is None:
            rule = "must be None: this model is not controlled by an image"
            raise InputError("control_image", pixels, rule)
        return {CONTROL: strength * self.model.control_encoder(pixels.to(self.device))}

    def no_control(self) -> dict[str, Tensor]:
        """Zeros for a prompt without a control image; empty for a model without control."""
        if not self.is_controlled:
            return {}
        zero = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)
        return {CONTROL: zero.expand(1, CONTROLLED_LAYERS, self.grid.cells, self.config.hidden_size)}

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[AnyState, PromptOutput]:
        """Prefill the prompts, and store the control of their images."""
        state, output = super().prefill(prompts, capacity, taps)
        if not self.is_controlled:
            return state, output
        control = [{**self.no_control(), **prompt}[CONTROL].to(self.device) for prompt in prompts]
        return self.extended(state, ControlledState, control=torch.cat(control)), output

    def further_inputs(self, state: AnyState, nodes: Nodes) -> Keywords:
        """The control of all cells; the model selects that of each node by its position."""
        return {CONTROL: state.control} if self.is_controlled else {}

    def positions(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Position ids of a prompt, counted back from the image, so that it ends where the image begins.

        `position_ids` [1, L] of the inputs are used unchanged, as for prompts with a part of the image.
        """
        length = inputs["input_ids"].shape[1]
        given = inputs.get("position_ids")
        if given is not None:
            return given, int(given[0, -1]) + 1 - length
        offset = self.config.prefix_length - length
        return offset + torch.arange(length, device=self.device)[None], offset

    def joinable(self, inputs: Keywords) -> Keywords:
        """Replace ids and captions, which may differ in length, by vectors, so that prompts can be joined."""
        rest = dict(inputs)
        ids, features = rest.pop("input_ids"), rest.pop("caption_features", None)
        return {**rest, EMBEDDINGS: self.model.model.embed(ids, features)}
