"""ImagePipeline: generates images with models that draw them token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from einops import repeat
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from mmspec.acceleration import Call
from mmspec.decoding.canvas import NOT_FINITE, Stopping
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import Request, Round
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.stats import merge_stats
from mmspec.errors import CheckpointError, InputError, NumericalError, UnsupportedModelError
from mmspec.models.checkpoint import check_vocabulary, load_model, load_processor
from mmspec.models.image_parts import (
    TEXT_ENCODER,
    TOKENIZER,
    VQ,
    load_chameleon_tokenizer,
    load_codebook,
    load_text_encoder,
    load_vq,
)
from mmspec.models.llamagen import LlamaGenConfig
from mmspec.models.llamagen.conversion import RAW_CODEBOOK_FILE
from mmspec.pipelines.base import MMSpecPipeline
from mmspec.pipelines.callbacks import CheckedCallback
from mmspec.pipelines.image_prompts import image_requests
from mmspec.pipelines.image_settings import ImageSettings, sampling_defaults
from mmspec.pipelines.outputs import ImageOutput
from mmspec.targets import CausalTarget, ImageTokenTarget, image_target
from mmspec.targets.image_families import IMAGE_FAMILIES

HAVE_VQ_APART = ("llamagen", "chameleon")  # the others hold their image tokenizer
PIXELS_AT_ONCE = 2**20  # through the decoder, whose inner layers hold hundreds of channels of them
UNDRAWN = -1


class ImagePipeline(MMSpecPipeline):
    """Generates images from prompts or class labels.

    `MMSpecPipeline.from_pretrained` returns one for LlamaGen. Models that also answer (Janus, Emu3,
    Chameleon) draw by `ImagePipeline.from_pretrained`.

    Args:
        model: the transformer, or the whole model where it holds its image tokenizer.
        processor: the tokenizer of the text encoder or of the model; None for models of classes.
        accelerator: a name from `mmspec.list_accelerators()`.
        vq: the image tokenizer of LlamaGen or Chameleon, a diffusers `VQModel`.
        text_encoder: the T5 encoder of a LlamaGen of captions.
        codebook: [K, d] the code vectors as they were trained, where `vq` keeps them normalised.
        options: options of the accelerator.

    Example:
        >>> pipe = MMSpecPipeline.from_pretrained("assets/scenes-llamagen")  # doctest: +SKIP
        >>> pipe("a red ring left of a small blue cross").images[0].save("image.png")  # doctest: +SKIP
    """

    default_accelerator = "sjd"
    target: ImageTokenTarget

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Any = None,
        accelerator: str | None = None,
        *,
        vq: Any = None,
        text_encoder: PreTrainedModel | None = None,
        codebook: Tensor | None = None,
        **options: Any,
    ) -> None:
        self.vq = vq
        self.text_encoder = text_encoder
        self._codebook = codebook
        self._progress: dict[str, Any] = {}
        super().__init__(model, processor, accelerator, **options)

    @classmethod
    def _load_parts(
        cls,
        source: str,
        config: PreTrainedConfig,
        where: dict[str, Any],
        how: dict[str, Any],
        parts: dict[str, str | Path],
    ) -> dict[str, Any]:
        if config.model_type not in IMAGE_FAMILIES:
            raise no_images_error(f"model type {config.model_type!r}")
        is_llamagen = isinstance(config, LlamaGenConfig)
        taken = {VQ: config.model_type in HAVE_VQ_APART, TEXT_ENCODER: reads_captions(config)}
        for name, part in parts.items():
            if not taken[name]:
                raise InputError(name, part, f"nothing: this {config.model_type} has no such part")
        loaded: dict[str, Any] = {}
        if is_llamagen:
            loaded["vq"] = load_vq(source, parts.get(VQ), **where)
            loaded["codebook"] = load_codebook(source, parts.get(VQ), **where)
        if isinstance(config, LlamaGenConfig) and reads_captions(config):
            loaded["text_encoder"], loaded["processor"] = load_text_encoder(
                source, config, parts.get(TEXT_ENCODER), how.get("dtype", "auto"), **where
            )
        if not is_llamagen:
            loaded["processor"] = load_processor(source, config, words_only=True, **where)
        model = load_model(source, config, surplus_allowed=not is_llamagen, **where, **how)
        if taken[VQ] and not is_llamagen:  # it may lie among the weights of the model, which are here by now
            loaded["vq"] = load_chameleon_tokenizer(source, parts.get(VQ), **where)
        for name in (VQ, TEXT_ENCODER):
            if name in loaded:
                loaded[name].to(model.device)
        return {"model": model, **loaded}

    def _adapt(self, model: PreTrainedModel) -> ImageTokenTarget:
        codebook = None if self._codebook is None else self._codebook.to(model.device, torch.float32)
        target = image_target(model, self.vq, codebook=codebook)
        if target is None:
            raise no_images_error(type(model).__name__)
        return target

    def _load_draft_model(self, drafter: str | Path | PreTrainedModel) -> tuple[CausalTarget, Any]:
        # a smaller model would have to read the condition again, of which tokens alone do not tell
        raise InputError("accelerator", "draft_model", "one for images: sjd, or a head that drafts (eagle)")

    def _check_parts(self) -> None:
        if self.vq is None and self.model.config.model_type in HAVE_VQ_APART:
            raise CheckpointError(VQ, None, "the image tokenizer, which turns tokens into pixels")
        if self.processor is not None:
            reader = self.model if self.text_encoder is None else self.text_encoder
            check_vocabulary(self.tokenizer, reader)

    @property
    def components(self) -> dict[str, Any]:
        """The parts, as diffusers names them."""
        parts = {"model": self.model, "vq": self.vq, "text_encoder": self.text_encoder}
        return {
            name: part for name, part in {**parts, "processor": self.processor}.items() if part is not None
        }

    def _write(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        if self.vq is not None:
            self.vq.save_pretrained(folder / VQ)
        if self._codebook is not None:
            save_file({"codebook": self._codebook}, folder / VQ / RAW_CODEBOOK_FILE)
        if self.text_encoder is not None:
            self.text_encoder.save_pretrained(folder / TEXT_ENCODER)
        if self.processor is not None:
            self.processor.save_pretrained(folder / TOKENIZER if self.text_encoder is not None else folder)

    def set_progress_bar_config(self, **config: Any) -> None:
        """Set tqdm's keywords for the bar that counts tokens, such as `disable=True`; as in diffusers."""
        self._progress = config

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        class_labels: int | Sequence[int | None] | None = None,
        negative_prompt: str | Sequence[str | None] | None = None,
        height: int | None = None,
        width: int | None = None,
        callback_on_step_end: Callable[..., Any] | None = None,
        return_dict: bool = True,
        **settings: Any,
    ) -> ImageOutput | tuple[Any]:
        """Generate images of one prompt or class, or of a list of them.

        Args:
            prompt: text, or a list, for models of captions.
            class_labels: a label, or a list, for models of classes.
            negative_prompt: what guidance leads away from; None takes the model's own "no prompt".
            height, width: pixels; None is the size that the model was trained for.
            callback_on_step_end: called after every round with the pipeline, the number of the round, the
                tokens committed so far, and a dict: `rows` (a range: which images are at work), `tokens`
                (of each) and `preview`, a function that decodes what there is of them to PIL images.
            return_dict: False returns the tuple (images,).
            settings: see `ImageSettings` (guidance_scale, num_images_per_prompt, temperature, top_k, top_p,
                seed, generator, output_type, ...).

        Returns:
            ImageOutput(images, tokens, stats, ...). Images that were interrupted are grey where nothing
            has been drawn.

        Raises:
            InputError: an argument cannot be used; raised before any forward pass of the transformer.
            NumericalError: an image's logits were not finite. The others are finished first; the
                exception's `output` holds the whole ImageOutput.
            PipelineBusyError: the pipeline is in use.
        """
        notify = None
        if callback_on_step_end is not None:
            if not callable(callback_on_step_end):
                allowed = "a function (pipe, step, committed, kwargs)"
                raise InputError("callback_on_step_end", callback_on_step_end, allowed)
            notify = CheckedCallback(callback_on_step_end, "callback_on_step_end")
        with self._busy():
            call = self.prepare(
                prompt,
                settings,
                class_labels=class_labels,
                negative_prompt=negative_prompt,
                height=height,
                width=width,
            )
            total, shown = len(call.requests) * call.grid.length, 0
            with logging.tqdm(**{"total": total, "unit": "token", **self._progress}) as bar:
                for step, _ in enumerate(call.rounds()):
                    bar.update(call.committed - shown)
                    shown = call.committed
                    bar.set_postfix_str(
                        f"{call.calls[-1].stats.acceptance_length:.1f} per forward", refresh=False
                    )
                    if notify is not None:
                        notify.call(self, step, call.committed, call.progress())
                    if self._interrupted.is_set():
                        break
            output = call.output()
        for index, error in call.errors():
            raised = NumericalError(index, error.position, NOT_FINITE)
            raised.output = output
            raise raised
        return output if return_dict else (output.images,)

    def prepare(self, prompt: Any, keywords: dict[str, Any], **what: Any) -> ImageCall:
        """Check all arguments and encode the prompts; nothing heavy has happened when this raises.

        Args:
            prompt: as of a call.
            keywords: its settings.
            what: class_labels, negative_prompt, height and width, where they are not None.

        Returns:
            The call, whose rounds can be watched as they are decoded.
        """
        settings = ImageSettings.from_keywords(sampling_defaults(self.model), keywords)
        given = what.get("class_labels") if prompt is None else prompt
        prompts = len(given) if isinstance(given, list | tuple) else 1
        sampler = settings.sampler(prompts)
        self.accelerator.check(sampler)
        random = settings.random(prompts, self.device)
        requests = image_requests(
            self.target,
            prompt,
            **what,
            guided=sampler.is_guided,
            num_images_per_prompt=settings.num_images_per_prompt,
            tokenizer=None if self.processor is None else self.tokenizer,
            text_encoder=self.text_encoder,
        )
        return ImageCall(self, requests, settings, sampler, random)


def reads_captions(config: PreTrainedConfig) -> bool:
    """True for a LlamaGen of captions."""
    return isinstance(config, LlamaGenConfig) and config.condition_type == "caption"


def no_images_error(name: str) -> UnsupportedModelError:
    """Make the error for a model that draws no images."""
    families = "LlamaGen, Janus, Emu3, Chameleon and Lumina-mGPT"
    return UnsupportedModelError(f"{name} draws no images token by token; models that do are {families}")


@dataclass(eq=False, repr=False)
class ImageCall:
    """One call in batches: the requests, and the tokens decoded so far.

    Attributes:
        requests: one for each image.
        calls: the batches that were begun.
        committed: tokens of all images so far.
    """

    pipeline: ImagePipeline
    requests: list[Request]
    settings: ImageSettings
    sampler: Sampler
    random: RandomStream
    calls: list[Call] = field(default_factory=list, init=False)
    committed: int = field(default=0, init=False)

    def rounds(self) -> Iterator[Round]:
        """Decode batch after batch, yielding every round; `calls[-1]` is the batch that it belongs to."""
        target, size, stopping = self.pipeline.target, self.settings.batch_size, Stopping(self.grid.length)
        for first in range(0, len(self.requests), size):
            requests = self.requests[first : first + size]
            random = RandomStream(self.random.keys[first : first + size])
            sampler = self.sampler.of_rows(slice(first, first + size))
            call = self.pipeline.accelerator.call(target, sampler, requests, stopping, random)
            self.calls.append(call)
            for step in call.rounds():
                self.committed += sum(map(len, step.emission.tokens))
                yield step

    def progress(self) -> dict[str, Any]:
        """Progress of the current batch: its rows, their tokens, and a function that makes images of them."""
        first = self.settings.batch_size * (len(self.calls) - 1)
        tokens = self.calls[-1].canvas.outputs()
        return {
            "rows": range(first, first + len(tokens)),
            "tokens": tokens,
            "preview": partial(self._images, "pil", tokens),
        }

    def errors(self) -> Iterator[tuple[int, NumericalError]]:
        """Errors of the images that ended in one."""
        found = [error for call in self.calls for error in call.canvas.errors]
        return ((index, error) for index, error in enumerate(found) if error is not None)

    def output(self) -> ImageOutput:
        """Make the output of the images drawn so far."""
        begun = [call.canvas for call in self.calls]
        missing = len(self.requests) - sum(len(batch.ids) for batch in begun)
        tokens = [row for batch in begun for row in batch.outputs()] + [[] for _ in range(missing)]
        reasons = [reason or "interrupted" for batch in begun for reason in batch.finish_reasons]
        drafted = [row for batch in begun for row in batch.drafted]
        kind, clock = self.settings.output_type, perf_counter()
        return ImageOutput(
            self._images(kind, tokens),
            tokens,
            merge_stats([call.stats for call in self.calls]),
            reasons + ["interrupted"] * missing,
            drafted + [[] for _ in range(missing)],
            perf_counter() - clock,
        )

    @property
    def grid(self) -> ImageGrid:
        """Grid of the images."""
        grid = self.requests[0].grid  # one call has one size
        return self.pipeline.target.grid if grid is None else grid

    def _images(self, kind: str, tokens: Sequence[Sequence[int]]) -> Any:
        """Images of tokens, in the form of an `output_type`."""
        if kind == "latent":
            return cells_of(self.grid, tokens)
        return VaeImageProcessor().postprocess(self._decode_pixels(tokens), kind)

    @torch.inference_mode()
    def _decode_pixels(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Decode tokens into images [n, 3, H, W] in [-1, 1] on the CPU, grey where nothing is drawn yet."""
        target, grid = self.pipeline.target, self.grid
        at_once = max(1, PIXELS_AT_ONCE // (grid.cells * target.stride**2))
        cells = cells_of(grid, tokens)
        images = []
        for part in cells.split(at_once):
            codes = part.clamp(min=0).flatten(1).to(target.device)
            pixels = target.decode_tokens(codes, grid).float().cpu()
            height, width = pixels.shape[-2] // grid.rows, pixels.shape[-1] // grid.columns
            drawn = repeat(part != UNDRAWN, "n rows columns -> n 1 (rows y) (columns x)", y=height, x=width)
            images.append(pixels * drawn)
        all_images: Tensor = torch.cat(images)
        return all_images


def cells_of(grid: ImageGrid, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Codes [n, rows, columns] of outputs, whole or cut short; -1 where there is none."""
    codes = [grid.codes(row) for row in tokens]
    filled = [row + [UNDRAWN] * (grid.cells - len(row)) for row in codes]
    return torch.tensor(filled).reshape(-1, grid.rows, grid.columns)
