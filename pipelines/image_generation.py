"""ImageGenerationPipeline, the base class of the pipelines for images, and its calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from einops import repeat
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from mmspec.accelerator import Call
from mmspec.core.canvas import NOT_FINITE, Canvas, RowOutput, Stopping
from mmspec.core.image_grid import ImageGrid, Layout
from mmspec.core.interfaces import Request, Round
from mmspec.core.random_stream import RandomStream, draw_seed
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import merge_stats
from mmspec.errors import InputError, NumericalError
from mmspec.families.image_parts import TEXT_ENCODER, TOKENIZER
from mmspec.open_types import AnyFunction, Keywords, Processor
from mmspec.pipelines.base import DRAWING, MMSpecPipeline
from mmspec.pipelines.callbacks import CheckedCallback
from mmspec.pipelines.image_prompts import find_grid, image_requests
from mmspec.pipelines.image_settings import OF_PROMPTS, ImageBatchSettings
from mmspec.pipelines.outputs import ImageOutput, Images
from mmspec.plugins import family_of, load
from mmspec.validation import plain_numbers
from mmspec.vectors.sampling import DenoisingSampler

__all__ = ["ImageCall", "ImageGenerationPipeline"]

PIXELS_AT_ONCE = 2**20  # decoded to pixels together; the inner layers of decoders have hundreds of channels


class ImageGenerationPipeline(MMSpecPipeline):
    """Image generation pipeline, the base class of `ImagePipeline` and `ContinuousImagePipeline`.

    Generates images from prompts or class labels. Use `from_pretrained`, which returns the subclass for the
    checkpoint.

    Args:
        model, processor, accelerator, options: as in `MMSpecPipeline`.
    """

    target: Any
    settings: ClassVar[type[ImageBatchSettings]]
    parts: ClassVar[Sequence[str]]  # attributes that are models in subfolders of a checkpoint

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Processor = None,
        accelerator: str | None = None,
        **options: Any,
    ) -> None:
        self._progress: Keywords = {}
        super().__init__(model, processor, accelerator, **options)

    @classmethod
    def _kind_for(cls, config: PreTrainedConfig) -> type[MMSpecPipeline]:
        if cls is not ImageGenerationPipeline:
            return cls
        family = family_of(config)
        draws = family.draws if family is not None and family.draws else "tokens"
        kind: type[MMSpecPipeline] = load(DRAWING[draws])
        return kind

    @property
    def components(self) -> dict[str, Any]:
        """Parts of the pipeline by name, as in diffusers."""
        models = {name: getattr(self, name) for name in ("model", *self.parts, "processor")}
        return {name: part for name, part in models.items() if part is not None}

    def _write(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        components = self.components
        for name in components.keys() & self.parts:
            components[name].save_pretrained(folder / name)
        if self.processor is not None:
            self.processor.save_pretrained(folder / TOKENIZER if TEXT_ENCODER in components else folder)

    def set_progress_bar_config(self, **config: object) -> None:
        """Set keywords of the tqdm progress bar, such as `disable=True`, as in diffusers."""
        self._progress = config

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        class_labels: int | Sequence[int | None] | Tensor | None = None,
        negative_prompt: str | Sequence[str | None] | None = None,
        height: int | None = None,
        width: int | None = None,
        control_image: object = None,
        control_strength: float | None = None,
        callback_on_step_end: AnyFunction | None = None,
        return_dict: bool = True,
        **settings: object,
    ) -> ImageOutput | tuple[Images]:
        """Generate images from one prompt or class label, or from a list of them.

        Args:
            prompt: a text or a list of texts, for text-to-image models.
            class_labels: a label, or a list, array or tensor of labels, for class-conditional models.
            negative_prompt: text or texts that guidance moves away from; model's own unconditional prompt if
                None.
            height, width: size in pixels; size for which the model was trained if None.
            control_image: control image (ControlAR) of the size of the output, such as edges or depth, or a
                list with one for each prompt. Accepts a path, PIL image, array, or another source of
                `mmspec.media.load_image`.
            control_strength: factor of the control; 0 disables it; 1 if None.
            callback_on_step_end: function called after every round with the pipeline, the number of the
                round, the number of tokens committed so far, and a dict. The dict has `rows` (range of the
                current images), `tokens` (of each), `frames` (number of complete frames of each clip), and
                `preview`, a function that decodes the unfinished images, or one frame of each (`frame=0` is
                the first), to PIL images.
            return_dict: False returns the tuple (images,).
            settings: fields of `ImageSettings` or `ContinuousSettings`: guidance_scale,
                num_images_per_prompt, temperature, top_k, top_p, seed, generator, output_type, ... Sampling
                settings that are not given are taken from the model's generation config, then from the
                published defaults of its family. The generation config of a model that also generates text
                is ignored. Images are sampled by default; `temperature=0` is greedy decoding of discrete
                tokens.

        Returns:
            ImageOutput(images, tokens, stats, ...). The undecided parts of interrupted images are grey.

        Raises:
            InputError: an argument cannot be used. It is raised before any forward pass of the transformer.
            NumericalError: the logits of an image are not finite. The other images are finished first; the
                attribute `output` of the exception is the whole ImageOutput.
            PipelineBusyError: another call is running.
        """
        notify = None
        if callback_on_step_end is not None:
            if not callable(callback_on_step_end):
                rule = "must be a function (pipe, step, committed, kwargs)"
                raise InputError("callback_on_step_end", callback_on_step_end, rule)
            notify = CheckedCallback(callback_on_step_end, "callback_on_step_end")
        what: Keywords = {"class_labels": class_labels, "negative_prompt": negative_prompt}
        with self._busy():
            what |= {"control_image": control_image, "control_strength": control_strength}
            call = self.prepare(prompt, settings, **what, height=height, width=width)
            total, shown = len(call.requests) * call.layout.length, 0
            with logging.tqdm(**{"total": total, "unit": "token", **self._progress}) as bar:
                for step, _ in enumerate(call.rounds()):
                    bar.update(call.committed - shown)
                    shown = call.committed
                    accepted = call.calls[-1].stats.acceptance_length
                    bar.set_postfix_str(f"{accepted:.1f} per forward pass", refresh=False)
                    if notify is not None:
                        notify.call(self, step, call.committed, call.progress())
                    if self._interrupted.is_set():
                        break
            output = call.output()
        call.check(output)
        return output if return_dict else (output.images,)

    def watch(self, prompt: object = None, **arguments: object) -> Generator[ImageCall, None, None]:
        """Generate images, yielding the call after every round; closing the iterator stops generation.

        `progress()` of the call describes the current images, and `output()` returns all images so far.
        Arguments and errors are those of `__call__`, without `callback_on_step_end` and `return_dict`.
        """
        with self._busy():
            call = self.prepare(prompt, arguments)
            for _ in call.rounds():
                yield call
                if self._interrupted.is_set():
                    break
        call.check()

    def prepare(self, prompt: Any, keywords: Keywords, **others: object) -> ImageCall:
        """Check all arguments of a call, in `keywords` or as `others`, and encode the prompts.

        Returns:
            The call; iterate over its `rounds()` to decode.

        Raises:
            InputError: an argument cannot be used; the transformer has not run.
        """
        asked = {**keywords, **others}
        control_image = asked.pop("control_image", None)
        what = plain_numbers({name: asked.pop(name, None) for name in OF_PROMPTS})
        settings = self.settings.from_keywords(self.target, asked)
        grid = self._find_grid(what.pop("height"), what.pop("width"))
        given = what["class_labels"] if prompt is None else prompt
        prompts = len(given) if isinstance(given, list | tuple) else 1
        sampler = self._sampler(settings, prompts, grid)
        self.accelerator.check(sampler)
        random = settings.random(prompts, self.device)
        requests = image_requests(
            self.target,
            prompt,
            **what,
            control_image=control_image,
            limits=self.media_limits,
            grid=grid,
            guided=sampler.is_guided,
            num_images_per_prompt=settings.num_images_per_prompt,
            tokenizer=None if self.processor is None else self.tokenizer,
            text_encoder=self.components.get("text_encoder"),
        )
        if random is None:  # drawn last, so that a refused call leaves torch's generator unchanged
            random = RandomStream.from_seed(draw_seed(), len(requests), self.device)
        return ImageCall(self, requests, settings, sampler, random)

    def _find_grid(self, height: int | None, width: int | None) -> ImageGrid:
        """Return the grid for a size, by default the model's; raise InputError for an unsupported size."""
        return find_grid(self.target, height, width)

    def _sampler(self, settings: Any, prompts: int, grid: ImageGrid) -> Sampler | DenoisingSampler:
        """Make the sampler for the images of all prompts."""
        raise NotImplementedError

    def _prepare_request(
        self, prompt: object, arguments: Keywords
    ) -> tuple[Call, Callable[[Canvas], ImageOutput]]:
        drawing = self.prepare(prompt, arguments)
        call = drawing.batch(0, len(drawing.requests))

        def output(canvas: Canvas) -> ImageOutput:
            drawing.calls = [replace(call, canvas=canvas)]
            return drawing.output()

        return call, output

    def _examples(self, rows: int) -> list[ImageCall]:
        if self.processor is None:
            return [self.prepare(None, {"seed": 0}, class_labels=[0] * rows, control_strength=0)]
        return [self.prepare(["a"] * rows, {"seed": 0}, control_strength=0)]

    def sampling(self, keywords: Keywords) -> Keywords:
        """Return the sampling settings of a call with these keywords, including the model's defaults."""
        raise NotImplementedError

    @property
    def stride(self) -> int:
        """Side of an image token in pixels."""
        raise NotImplementedError

    def drawn(self, canvas: Canvas) -> list[RowOutput]:
        """Return the tokens of every row decoded so far."""
        return canvas.outputs()

    def latents(self, layout: Layout, rows: Sequence[RowOutput]) -> Tensor:
        """Arrange the tokens of images (`drawn`) in their grid, with a mark where a token is missing."""
        raise NotImplementedError

    @torch.inference_mode()
    def pixels(self, layout: Layout, latents: Tensor) -> Tensor:
        """Decode latents to images [n, 3, H, W] in [-1, 1] on the CPU, grey where tokens are missing."""
        grid = layout.image
        at_once = max(1, PIXELS_AT_ONCE // (grid.cells * self.stride**2))
        images = []
        for part in latents.split(at_once):
            pixels, is_drawn = self._decode(grid, part)
            height, width = pixels.shape[-2] // grid.rows, pixels.shape[-1] // grid.columns
            shown = repeat(is_drawn.cpu(), "n rows columns -> n 1 (rows y) (columns x)", y=height, x=width)
            images.append(pixels.float().cpu() * shown)
        all_images: Tensor = torch.cat(images)
        return all_images

    def _decode(self, grid: ImageGrid, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images [n, 3, H, W] of latents, and a mask [n, rows, columns] of the decided cells."""
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class ImageCall:
    """One call, decoded in batches: its requests, one for each image, and the tokens decoded so far."""

    pipeline: ImageGenerationPipeline
    requests: list[Request]
    settings: ImageBatchSettings
    sampler: Sampler | DenoisingSampler
    random: RandomStream
    calls: list[Call] = field(default_factory=list, init=False)  # the batches started so far
    committed: int = field(default=0, init=False)  # number of tokens of all images so far

    def rounds(self, is_watched: bool = False) -> Generator[Round, None, None]:
        """Decode batch after batch, yielding every round; `calls[-1]` is its batch.

        Args:
            is_watched: whether the caller reads the tensors of the rounds; see `speculate`.
        """
        size = self.settings.batch_size
        for first in range(0, len(self.requests), size):
            call = self.batch(first, size)
            self.calls.append(call)
            for step in call.rounds(is_watched):
                self.committed += sum(map(len, step.emission.tokens))
                yield step

    def batch(self, first: int, size: int) -> Call:
        """Set up the decoding of up to `size` images."""
        requests = self.requests[first : first + size]
        rows = range(first, first + len(requests))
        sampler, random = self.sampler.part(rows), self.random.part(rows)
        stopping = Stopping(self.layout.length)
        return self.pipeline.accelerator.call(self.pipeline.target, sampler, requests, stopping, random)

    def progress(self) -> Keywords:
        """Return the progress of the current batch: its rows, their tokens, and a preview function."""
        first = self.settings.batch_size * (len(self.calls) - 1)
        tokens = self.pipeline.drawn(self.calls[-1].canvas)
        return {
            "rows": range(first, first + len(tokens)),
            "tokens": tokens,
            "frames": self.layout.image.frames * min(map(len, tokens)) // self.layout.length,
            "preview": partial(self._images, "pil", tokens),
        }

    def check(self, output: ImageOutput | None = None) -> None:
        """Raise the NumericalError of the first failed image; its `output` has all images."""
        errors = [error for call in self.calls for error in call.canvas.errors]
        for index, error in enumerate(errors):
            if error is not None:
                raised = NumericalError(index, error.position, NOT_FINITE)
                raised.output = self.output() if output is None else output
                raise raised

    def output(self) -> ImageOutput:
        """Return the output of the images decoded so far."""
        begun = [call.canvas for call in self.calls]
        missing = len(self.requests) - sum(len(batch.ids) for batch in begun)
        tokens: list[RowOutput] = [row for batch in begun for row in self.pipeline.drawn(batch)]
        tokens += [[] for _ in range(missing)]
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
            self.layout.image.frames,
        )

    @property
    def layout(self) -> Layout:
        """Layout of the outputs."""
        found: Any = self.requests[0].layout  # one call has one size
        layout: Layout = found
        return layout

    def _images(self, kind: str, tokens: Sequence[RowOutput], frame: int | None = None) -> Images:
        """Decode tokens to whole images, or to one frame of each, in the format of an `output_type`."""
        layout = self.layout
        if frame is not None:
            grid = layout.image
            if frame not in range(grid.frames):
                rule = f"must be an integer from 0 to {grid.frames - 1}, or None for all frames"
                raise InputError("frame", frame, rule)
            layout = grid.frame
            tokens = [row[frame * layout.length : (frame + 1) * layout.length] for row in tokens]
        latents = self.pipeline.latents(layout, tokens)
        if kind == "latent":
            return latents
        return VaeImageProcessor().postprocess(self.pipeline.pixels(layout, latents), kind)
