"""Target of DiffusionGemma: an encoder caches decided tokens, and a decoder denoises canvases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mmspec.core.draft import Draft
from mmspec.core.interfaces import Drafter, PromptOutput, Rule, TargetOutput, TargetState
from mmspec.errors import InputError
from mmspec.open_types import Keywords
from mmspec.places.noise_canvas import CanvasBlock, CanvasFill
from mmspec.targets.causal import to_device
from mmspec.targets.model_target import ModelTarget
from mmspec.transformers_versions import CACHE

__all__ = ["DiffusionGemmaState", "DiffusionGemmaTarget"]

#: Settings of `Renoise` -> their names in a generation config.
SETTINGS = {
    "denoising_steps": "max_denoising_steps",
    **{name: name for name in ("t_min", "t_max", "stability_threshold", "confidence_threshold")},
}


@dataclass
class DiffusionGemmaState(TargetState):
    """State of a batch: caches, and the logits for self-conditioning.

    Attributes:
        caches: cache of each row, with its prompt and its decided canvases.
        prompts: number of tokens of each prompt.
        encoded: number of output tokens of each row whose keys are cached.
        canvas: [B, L] canvases that were decided last; their keys are computed with the next draft.
        previous: [B, L, V] logits of the last step, and [B] whether they belong to the current canvas.
    """

    caches: list[DynamicCache]
    prompts: list[int]
    encoded: list[int]
    canvas: Tensor | None = None
    previous: tuple[Tensor, Tensor] | None = None

    def nbytes(self) -> int:
        layers: Any = (layer for cache in self.caches for layer in cache.layers)
        held = (each for layer in layers for each in (layer.keys, layer.values))
        return sum(each.nbytes for each in held if isinstance(each, Tensor))


class DiffusionGemmaTarget(ModelTarget[DiffusionGemmaState]):
    """Adapter from a DiffusionGemma of transformers to the Target interface.

    Rows are read one by one and never padded, so that the output of a row does not depend on the others.

    Args:
        model: a loaded model, on its device, in eval mode.

    Attributes:
        canvas_length: number of tokens L of a canvas.
        published: settings of plain decoding, as of `Renoise`.
    """

    by_blocks = True
    prefix_cache = None

    def plain_decoding(self) -> tuple[Drafter, Rule[CanvasBlock]]:
        from mmspec.families.diffusion_gemma.canvas import NoiseCanvasDrafter  # which imports this module
        from mmspec.families.diffusion_gemma.renoise import Renoise

        rule = Renoise()
        return NoiseCanvasDrafter(rule).fit(self), rule.fit(self)

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.config
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.canvas_length: int = model.config.canvas_length
        self.steps = None
        settings = model.generation_config
        sampler = getattr(settings, "sampler_config", None)
        found = {"entropy_bound": getattr(sampler, "entropy_bound", None)}
        found |= {own: getattr(settings, theirs, None) for own, theirs in SETTINGS.items()}
        self.published: Keywords = {name: one for name, one in found.items() if one is not None}

    def compile(self) -> None:
        """Raise InputError: compilation is not supported.

        Raises:
            InputError: always.
        """
        raise InputError("compile", type(self.model).__name__, "does not support this model")

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[DiffusionGemmaState, PromptOutput]:
        """Prefill the prompts, images included. Returns the state and empty logits [R, 0, V].

        Raises:
            InputError: `taps` is not empty.
        """
        if taps:
            raise InputError("taps", tuple(taps), "must be empty: no head drafts for DiffusionGemma")
        caches = [DynamicCache(config=self.config.get_text_config(decoder=True)) for _ in prompts]
        for cache, prompt in zip(caches, prompts, strict=True):
            self._encode(cache, prompt)
        lengths = [prompt["input_ids"].shape[1] for prompt in prompts]
        logits = torch.empty(len(prompts), 0, self.vocabulary, dtype=torch.float32, device=self.device)
        return DiffusionGemmaState(caches, lengths, [0] * len(prompts)), PromptOutput(logits)

    def _encode(self, cache: DynamicCache, prompt: Mapping[str, Tensor]) -> None:
        """Append the keys of tokens [1, n] to a cache."""
        inputs = to_device(prompt, self.device)
        tokens = inputs.pop("input_ids")
        inputs.pop("attention_mask", None)
        known, count = cache.get_seq_length(), tokens.shape[1]
        positions = torch.arange(known, known + count, device=self.device)[None]
        encoder = self.model.model.encoder
        masks = encoder.create_masks_for_generate(
            config=self.config,
            inputs_embeds=torch.empty(1, count, 0, dtype=self.dtype, device=self.device),
            attention_mask=torch.ones(1, known + count, dtype=torch.bool, device=self.device),
            **{CACHE: cache},
            position_ids=positions,
            mm_token_type_ids=inputs.get("mm_token_type_ids"),
        )
        encoder(input_ids=tokens, attention_mask=masks, **{CACHE: cache}, position_ids=positions, **inputs)

    def score(self, state: DiffusionGemmaState, draft: CanvasBlock) -> TargetOutput:
        """Score the canvas of each row, after encoding the canvas that was decided before it."""
        tokens = draft.tokens[:, :, 0]
        logits = torch.zeros(*tokens.shape, self.vocabulary, dtype=torch.float32, device=self.device)
        for row, begin in enumerate(draft.begins):
            if begin is None:
                continue
            if state.canvas is not None and state.encoded[row] < begin:
                self._encode(state.caches[row], {"input_ids": state.canvas[row : row + 1]})
                state.encoded[row] = begin
            previous = None if state.previous is None else [each[row : row + 1] for each in state.previous]
            logits_before, known = previous or (None, None)
            length = state.prompts[row] + begin
            output = self.model(
                decoder_input_ids=tokens[row : row + 1],
                self_conditioning_logits=logits_before,
                self_conditioning_mask=known,
                **{CACHE: state.caches[row]},
                decoder_position_ids=torch.arange(length, length + tokens.shape[1], device=self.device)[None],
            )
            logits[row] = output.logits[0]
        return TargetOutput(logits)

    def commit(self, state: DiffusionGemmaState, draft: Draft, verdict: CanvasFill, active: Tensor) -> None:
        """Store the decided canvases, and the logits that condition the next step of the others."""
        done = verdict.decided.all(-1, keepdim=True)
        state.canvas = verdict.values if state.canvas is None else verdict.values.where(done, state.canvas)
        embeddings = self.model.get_input_embeddings().weight
        state.previous = verdict.logits.to(embeddings.dtype), ~done[:, 0]
