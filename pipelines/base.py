"""MMSpecPipeline, the base class: loading, accelerators, caches, compilation, saving and interrupting."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import tqdm

from mmspec.accelerator import Accelerator, Call
from mmspec.accelerators import build_accelerator, option_names, options_of
from mmspec.accelerators.tuned import AUTO, check_tuned_for, find_tuned
from mmspec.atomic_file import new_folder
from mmspec.core.canvas import Canvas
from mmspec.core.graphs import graphs_mode, has_graphs
from mmspec.errors import CheckpointError, InputError, PipelineBusyError, UnsupportedModelError
from mmspec.heads.checkpoint import check_no_other, load_head, place_head
from mmspec.media import DEFAULT_LIMITS, MediaLimits
from mmspec.models.adapters import load_adapter, save_model
from mmspec.models.checkpoint import (
    bytes_of,
    check_same_tokenizer,
    check_source,
    check_vocabulary,
    load_config,
    load_model,
    load_processor,
    tokenizer_of,
)
from mmspec.models.drafters_file import OwnDrafter
from mmspec.models.linear_layers import SHARE
from mmspec.models.weights import execution_device, is_offloaded
from mmspec.open_types import Keywords, Processor
from mmspec.pipelines.drafter import DrafterSource, check_accelerator, find_drafter, read_written
from mmspec.pipelines.loading import Checkpoint
from mmspec.pipelines.outputs import CallOutput
from mmspec.plugins import HEADS, METHODS, family_of, load, register_families
from mmspec.targets import CausalTarget, adapt
from mmspec.targets.memory import MemoryPlan
from mmspec.targets.prefix import PrefixCache
from mmspec.targets.steps import LEAST_CAPACITY, CapturedForward
from mmspec.targets.vision_language import AUTOREGRESSIVE, check_mode
from mmspec.validation import given_of, is_integer, require_number

if TYPE_CHECKING:
    from mmspec.pipelines.image_generation import ImageCall
    from mmspec.pipelines.running_batch import RunningBatch

logger = logging.getLogger(__name__)
register_families()
#: Pipeline classes of image generators, by the kind of image tokens.
DRAWING = {
    "tokens": "mmspec.pipelines.image_tokens:ImagePipeline",
    "vectors": "mmspec.pipelines.continuous_images:ContinuousImagePipeline",
}

TUNED_FOR = {"batch_size", "tv"}
DEFAULT_PREFIX_BYTES = 2 * 2**30
PREFILL_TOKENS = 512
OWN_TO_EACH = {"target", "_lock", "_interrupted"}
ROUNDS_TO_COMPILE = 5  # prefill, a first round, two of the same shapes, of which the second is captured

#: `device_map` of transformers: a name, a device, or a device for each module.
DeviceMap: TypeAlias = str | int | torch.device | Mapping[str, str | int | torch.device] | None


class MMSpecPipeline:
    """Pipeline for speculative and parallel decoding: a model together with an accelerator.

    Load one with `MMSpecPipeline.from_pretrained`, which returns the subclass for the checkpoint:
    `VisionLanguagePipeline` for text, `SpeechPipeline` for transcripts, `ImagePipeline` or
    `ContinuousImagePipeline` for images.

    Attributes:
        default_accelerator: name of the accelerator that is used if neither you nor `drafters.json` in the
            model's folder names one; see `from_pretrained`.
        model: the transformers model.
        processor: the processor of the model, or its tokenizer if it takes no images.
        target: the model behind mmspec's `Target` interface.
        accelerator: the current accelerator; change it with `set_accelerator`.
        media_limits: limits on images and videos, a `MediaLimits`; assign another one to change them.

    Example:
        >>> pipe = MMSpecPipeline.from_pretrained("assets/scenes-llava", accelerator="copy")  # doctest: +SKIP
        >>> output = pipe("What is in the image?", images="scene.png")  # doctest: +SKIP
        >>> print(output.text[0], output.stats.acceptance_length)  # doctest: +SKIP
    """

    default_accelerator: str = "copy"

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Processor,
        accelerator: str | None = None,
        mode: str | None = None,
        **options: Any,
    ) -> None:
        self.model, self.mode = model, mode
        self.processor = processor
        self.default_accelerator = self._default_for(model.config, mode)
        self.target = self._adapt(model)
        self._check_parts()
        self.media_limits: MediaLimits = DEFAULT_LIMITS
        self.draft_processor: Processor = None
        self._folder: Path | None = None
        self._prefix_bytes: int | None = None
        self._prefill_tokens: int | None = None
        self._packing_share = SHARE
        self._is_compiled = False
        self._lock = threading.Lock()
        self._interrupted = threading.Event()
        self.set_accelerator(self.default_accelerator if accelerator is None else accelerator, **options)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        accelerator: str | None = None,
        drafter: DrafterSource | None = None,
        mode: str | None = None,
        vq: str | Path | None = None,
        text_encoder: str | Path | None = None,
        vae: str | Path | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: DeviceMap = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        **options: object,
    ) -> MMSpecPipeline:
        """Load a checkpoint and return the pipeline for it.

        `MMSpecPipeline.from_pretrained` chooses the pipeline class from the model. Models that generate both
        text and images (Janus, Emu3, Chameleon) get the `VisionLanguagePipeline`; call
        `ImagePipeline.from_pretrained` to generate images with them.

        Args:
            pretrained_model_name_or_path: local folder, hub id, GGUF file, or LoRA adapter, which peft loads
                on top of its base model.
            accelerator: a name from `mmspec.list_accelerators()` or "auto", with or without options
                (`"copy:num_draft_tokens=8"`); see `set_accelerator`. None is, for text, the default of
                `drafters.json` in the model's folder, with its drafter, as in commands and the server.
                Otherwise it is "copy" for text, "sjd" for discrete image tokens, and "none" for continuous
                ones and for models that decide several places per forward pass (LLaDA, Dream, SDAR,
                DiffusionGemma, VAR, PAR, NAR, LPD). With mode="autoregressive" it is "self_speculation".
            drafter: folder or hub id of the draft model or head, or a loaded model, for accelerators that
                need one. None uses the drafter that `drafters.json` in the model's folder names.
            mode: decoding mode of a model that was trained for both masked blocks and next-token prediction:
                "blocks" (the default) or "autoregressive".
            vq, text_encoder, vae: folder or hub id of a part of an image model, if the checkpoint has no
                subfolder for it.
            dtype: data type of the weights, as in transformers. `torch_dtype` is an alias.
            device_map, attn_implementation, revision, token, cache_dir, local_files_only,
                trust_remote_code: passed to transformers.
            options: options of the accelerator (`num_draft_tokens=8`, `acceptance="..."`), and further
                keywords of transformers' `from_pretrained`: for the model (`quantization_config`), its files
                (`subfolder`), its processor (`max_pixels`) or its config.

        Returns:
            The pipeline, a subclass of `MMSpecPipeline`. Its calls take unset sampling settings (temperature,
            top_k, ...) from the model's generation config, which may sample, as in transformers; pass
            `temperature=0` for greedy decoding.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or does not fit the model.
            UnsupportedModelError: mmspec cannot decode the model speculatively.
            InputError: an accelerator or a keyword is unknown, has no effect, or is out of range. It is
                raised before weights are loaded.
            MissingDependencyError: a package that the checkpoint needs is not installed.
        """
        # check as much as possible before loading weights, so that a typo costs no load
        accelerator, drafter, options = read_written(accelerator, drafter, options)
        if accelerator not in (None, AUTO):
            METHODS[accelerator]
        explicit = given_of(
            dtype=torch_dtype if dtype is None else dtype,
            device_map=device_map,
            attn_implementation=attn_implementation,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            trust_remote_code=trust_remote_code,
        )
        found = Checkpoint.look_at(pretrained_model_name_or_path, {**explicit, **options})
        if found.config is None:
            with found.reading_config() as where:
                found = replace(found, config=load_config(found.config_source, **where))
        kind = cls._kind_for(found.model_config)
        check_mode(found.model_config, mode)
        if accelerator is None and drafter is None and (own := kind._own_default(found.folder)) is not None:
            accelerator, drafter = own.accelerator, own.folder
        found, fitting = kind._check_accelerator(found, accelerator, drafter, mode)
        loaded = kind._load_parts(found, given_of(vq=vq, text_encoder=text_encoder, vae=vae))
        model = loaded["model"]
        if found.adapter is not None:
            load_adapter(model, found.adapter)
        logger.info("target: %.1f MB of weights, %s", bytes_of(model) / 1e6, model.dtype)
        if isinstance(fitting, PreTrainedModel) and not isinstance(drafter, PreTrainedModel):
            place_head(fitting, model.dtype, execution_device(model))  # the head was loaded before the model
        given = given_of(drafter=fitting, mode=mode)
        pipe = kind(**loaded, accelerator=accelerator, **found.options, **given)
        pipe._folder = found.folder
        return pipe

    @classmethod
    def _check_accelerator(
        cls, found: Checkpoint, name: str | None, drafter: DrafterSource | None, mode: str | None
    ) -> tuple[Checkpoint, DrafterSource | None]:
        """Check the accelerator before weights are loaded; return the sorted checkpoint and the drafter."""
        if name == AUTO:
            known = TUNED_FOR.union(*map(options_of, METHODS.values()))
            check_tuned_for(drafter, **{key: found.options[key] for key in found.options if key in known})
            return found.sorted(name, TUNED_FOR, cls._reader), drafter
        name = cls._default_for(found.model_config, mode) if name is None else name
        preset = cls._preset(found.model_config, name) if drafter is None else name
        names = option_names(preset, found.options.get("acceptance"))
        found = found.sorted(name, names, cls._reader)
        return found, check_accelerator(found, name, drafter, preset=preset)

    @classmethod
    def _reader(cls, found: Checkpoint, **reading: Any) -> Processor:
        """Load the processor or tokenizer; None if the checkpoint has none that takes keywords."""
        source, where = found.reader
        return load_processor(source, found.model_config, **where, **reading)

    @classmethod
    def _preset(cls, config: PreTrainedConfig, name: str) -> str:
        """Return the name of the model family's preset for an accelerator without a drafter."""
        family = family_of(config)
        return name if family is None else family.presets.get(name, name)

    @classmethod
    def _default_for(cls, config: PreTrainedConfig, mode: str | None = None) -> str:
        """Return the name of the default accelerator for a model."""
        if mode == AUTOREGRESSIVE:
            return "self_speculation"
        family = family_of(config)
        return cls.default_accelerator if family is None or not family.accelerator else family.accelerator

    @classmethod
    def _own_default(cls, folder: Path) -> OwnDrafter | None:
        """Return the drafter that the model's folder names as default; None in pipelines for images."""
        return None

    @classmethod
    def _kind_for(cls, config: PreTrainedConfig) -> type[MMSpecPipeline]:
        """Return the pipeline class for a model: this class, unless it is the base class."""
        return pipeline_for(config) if cls is MMSpecPipeline else cls

    @classmethod
    def _load_parts(cls, found: Checkpoint, parts: dict[str, str | Path]) -> Keywords:
        """Load the arguments of the constructor; `parts` locates those outside the checkpoint."""
        config = found.model_config
        family = family_of(config)
        if family is not None and family.draws and not family.answers:
            message = f"models of type {config.model_type!r} generate images only"
            how = "load them with MMSpecPipeline.from_pretrained, or use `mmspec generate`"
            raise UnsupportedModelError(f"{message}; {how}")
        if parts:
            name, value = next(iter(parts.items()))
            raise InputError(name, value, f"must be None; {config.model_type} models have no such part")
        return {
            "processor": cls._reader(found, **found.reading),
            "model": load_model(found.source, config, **found.where, **found.how),
        }

    def _adapt(self, model: PreTrainedModel) -> CausalTarget:
        """Adapt the model to the Target interface."""
        return adapt(model, self.mode)

    def _check_parts(self) -> None:
        """Raise CheckpointError if the parts do not fit together."""
        check_vocabulary(self.tokenizer, self.model)

    def set_accelerator(
        self,
        accelerator: str | Accelerator,
        *,
        drafter: DrafterSource | None = None,
        **options: Any,
    ) -> Self:
        """Change the accelerator without reloading the model.

        Args:
            accelerator: one of
                a name from `mmspec.list_accelerators()`, alone or with options as on the command line, such
                as "sjd:window=16";
                an accelerator built by a function of `mmspec.accelerators`, such as `sjd(window=16)`;
                or "auto" for the accelerator that `mmspec tune` found fastest for this model and device. Its
                options are `batch_size` (1) and `tv` (0), the conditions of the tuning.
            drafter: folder or hub id of the draft model or head, or a loaded model, for accelerators that
                need one. None uses the drafter that `drafters.json` names in the pipeline's folder.
            options: options of the accelerator and of its acceptance rule; `acceptance` selects another rule.

        Returns:
            The pipeline itself.

        Raises:
            InputError: a name or an option is unknown, a value is out of range, or the drafter and the
                acceptance rule cannot be combined.
            CheckpointError: the draft model cannot be loaded or has another tokenizer.
            PipelineBusyError: a call is running.
        """
        accelerator, drafter, options = read_written(accelerator, drafter, options)
        if accelerator == AUTO:
            check_tuned_for(drafter, **options)
            tuned = find_tuned(self.model, **options)
            return self.set_accelerator(tuned.accelerator, **tuned.options)
        with self._busy():
            if isinstance(accelerator, Accelerator):
                given = options if drafter is None else {"drafter": drafter, **options}
                for name, value in given.items():
                    rule = (
                        "cannot be combined with a built accelerator; pass it to the accelerator's function"
                    )
                    raise InputError(name, value, rule)
                made, reader = accelerator, accelerator.drafter.reader
                draft_processor = None if reader is None else self._reader_of(reader)
            else:
                made, draft_processor = self._build_accelerator(accelerator, drafter, options)
            self.accelerator: Accelerator = made.fit(self.target)
            self.draft_processor = draft_processor
            self._attach()
        return self

    def _build_accelerator(
        self, name: str, drafter: DrafterSource | None, options: Keywords
    ) -> tuple[Accelerator, Processor]:
        """Build an accelerator by name; return it with the processor of its draft model, if it has one."""
        checkpoint = self.model.name_or_path or None
        found = find_drafter(name, drafter, folder=self._folder, checkpoint=checkpoint)
        if found is None:
            return build_accelerator(name, **options), None
        if name in HEADS:
            head = load_head(name, found, self.target.config, self.target.dtype, self.target.device)
            return build_accelerator(name, model=head, **options), None
        model, processor = self._load_draft_model(found)
        return build_accelerator(name, model=model, **options), processor

    def _load_draft_model(self, drafter: DrafterSource) -> tuple[CausalTarget, Processor]:
        """Load the draft model and its processor; None if the draft model reads the target's inputs."""
        if isinstance(drafter, PreTrainedModel):
            check_no_other("draft_model", drafter)
            draft = adapt(drafter)
            return draft, self._reader_of(draft)
        source = check_source(drafter, "drafter")
        check_no_other("draft_model", source)
        config = load_config(source, argument="drafter")
        processor = load_processor(source, config, argument="drafter")
        check_same_tokenizer(tokenizer_of(self.processor), tokenizer_of(processor), source)
        model = load_model(source, config, argument="drafter", dtype=self.dtype, device_map={"": self.device})
        logger.info("draft model: %.1f MB of weights", bytes_of(model) / 1e6)
        return adapt(model), processor

    def _reader_of(self, draft: CausalTarget) -> Processor:
        """Return the processor of a loaded draft model: the tokenizer if only the target reads images."""
        return self.tokenizer if type(draft) is not type(self.target) else None

    def __repr__(self) -> str:
        name, model = type(self).__name__, type(self.model).__name__
        where = f"device={str(self.device)!r}, dtype={self.dtype}"
        return f"{name}(model={model}, accelerator={self.accelerator.name!r}, {where})"

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the model's weights."""
        return self.model.dtype

    @property
    def tokenizer(self) -> Processor:
        """Tokenizer of the processor."""
        return tokenizer_of(self.processor)

    @property
    def components(self) -> dict[str, object]:
        """Parts of the pipeline by name, as in diffusers."""
        return {"model": self.model, "processor": self.processor}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the model and the draft model, with the arguments of `torch.nn.Module.to`.

        Raises:
            InputError: parts of the model are offloaded by `device_map` and cannot be moved.
            PipelineBusyError: a call is running.
        """
        with self._busy():
            parts = [part for part in self.components.values() if isinstance(part, torch.nn.Module)]
            if any(map(is_offloaded, parts)):
                rule = "cannot move a model with offloaded parts; load it with another device_map"
                raise InputError("to", args or kwargs, rule)
            for part in parts:
                part.to(*args, **kwargs)
            self.target = self._adapt(self.model)
            self.accelerator.drafter.to(*args, **kwargs)
            self.accelerator = self.accelerator.fit(self.target)
            self._attach()
        return self

    def __getstate__(self) -> Keywords:
        """State for copies, without the target, the lock and the flag, which each pipeline creates itself."""
        return {name: value for name, value in vars(self).items() if name not in OWN_TO_EACH}

    def __setstate__(self, state: Keywords) -> None:
        vars(self).update(state)
        self._lock, self._interrupted = threading.Lock(), threading.Event()
        self.target = self._adapt(self.model)
        self.accelerator = self.accelerator.fit(self.target)
        self._attach()

    def enable_prefix_cache(self, max_bytes: int = DEFAULT_PREFIX_BYTES) -> None:
        """Enable the prefix cache: prefill reuses the longest prefix shared with earlier prompts.

        The cache helps in conversations and with several questions about one image, since images in the
        prefix are reused too. It also stores the keys of replies, unless the accelerator is a head or the
        model has recurrent layers, and encoded images, for prompts with other text in front of a known image.
        Outputs are the same as without the cache, up to rounding. A draft model gets a cache of the same
        size.

        Entries become invalid when weights, adapters or module options change, and `to` empties the cache.
        While a hook or a custom `forward` is set on the model, prompts are not cached. Writes to a few rows
        through `tensor.data` are not detected: call `disable_prefix_cache` and this method again after them.

        Args:
            max_bytes: memory limit for keys, values, hidden states and encoded images, in bytes. The least
                recently used blocks of tokens are evicted first.

        Raises:
            InputError: `max_bytes` is not a positive integer, or the model is a masked model or generates
                continuous image tokens.
            PipelineBusyError: a call is running.
        """
        if self.target.vector_size:
            rule = "is not available for models of continuous image tokens, whose prompts are short"
            raise InputError("prefix cache", type(self.model).__name__, rule)
        if self.target.by_blocks:
            rule = "is not available for masked models, whose keys of a prompt depend on the output"
            raise InputError("prefix cache", type(self.model).__name__, rule)
        with self._busy():
            self._prefix_bytes = PrefixCache(max_bytes).max_bytes
            self._attach_prefill()

    def disable_prefix_cache(self) -> None:
        """Disable the prefix cache and free its memory.

        Raises:
            PipelineBusyError: a call is running.
        """
        with self._busy():
            self._prefix_bytes = None
            self._attach_prefill()

    def enable_chunked_prefill(self, tokens: int = PREFILL_TOKENS) -> None:
        """Read long prompts in several forward passes, of the target and of a draft model.

        Chunks bound the memory of a prefill: the attention mask of a chunk has a row for each of its tokens,
        and a column for each token of the prompt, or of the window in layers with a sliding window. In a
        running batch, rounds are decoded between the chunks of a prompt, and short prompts that wait together
        share a forward pass. Outputs are the same as without chunks, up to rounding.

        Images are not split. A prompt is read whole if its tokens attend to later ones beyond their own image
        (PaliGemma, Gemma 4), if rotary frequencies change within it, if the model has recurrent layers
        without a closed form (Mamba), or while hooks are set on the model.

        Args:
            tokens: largest number of prompt tokens in a forward pass.

        Raises:
            InputError: `tokens` is not a positive integer.
            PipelineBusyError: a call is running.
        """
        if not is_integer(tokens) or tokens < 1:
            raise InputError("tokens", tokens, "must be a positive integer")
        self._set_prefill_tokens(tokens)

    def disable_chunked_prefill(self) -> None:
        """Read every prompt in one forward pass.

        Raises:
            PipelineBusyError: a call is running.
        """
        self._set_prefill_tokens(None)

    def _set_prefill_tokens(self, tokens: int | None) -> None:
        with self._busy():
            self._prefill_tokens = tokens
            self._attach_prefill()

    def enable_packing(self, share: float = SHARE) -> None:
        """Keep packed copies of the linear layers on a CPU. This is on by default.

        With packed layers, a forward pass over several tokens takes little longer than one over a single
        token. A layer is packed at its first such use, as long as all packed copies of the process fit into
        a share of the memory that is free without them. A layer whose weights change is packed again in the
        next call.

        Args:
            share: share of the free memory, from 0 to 1. `compile` sets it to 1, unless packing is disabled.

        Raises:
            InputError: the share is out of range.
            PipelineBusyError: a call is running.
        """
        require_number("share", share, 0, 1, "must be between 0 and 1")
        with self._busy():
            self._packing_share = float(share)
            self._attach()

    def disable_packing(self) -> None:
        """Disable packed copies of the linear layers; existing copies are freed in the next call.

        Raises:
            PipelineBusyError: a call is running.
        """
        self.enable_packing(0.0)

    def compile(self, batch_sizes: Sequence[int] = (1,)) -> Self:
        """Compile the decoding steps of the model and of a draft model. Outputs change by rounding alone.

        On a GPU this takes seconds: steps are captured in CUDA graphs. On a CPU it takes about a minute, and
        torch.compile needs a C++ compiler. The method prints the planned memory for each batch size.

        Compilation stays enabled after `set_accelerator` and `to`; new shapes are compiled at their first
        use. Parts that cannot be compiled run as before, and a warning of the logger `mmspec` names them.
        With the environment variable MMSPEC_GRAPHS=auto, a GPU captures without this method what has come a
        few times; with MMSPEC_GRAPHS=off it captures nothing.

        Args:
            batch_sizes: numbers of prompts or images to compile for now.

        Returns:
            The pipeline itself.

        Raises:
            InputError: a batch size is not a positive integer, or needs more memory than the GPU has left.
            PipelineBusyError: a call is running.
        """
        for rows in batch_sizes:
            if not is_integer(rows) or rows < 1:
                raise InputError("batch_sizes", batch_sizes, "must be positive integers")
        plans = {rows: self._plan_memory(rows) for rows in batch_sizes}
        for rows, plan in plans.items():
            plan.check(rows, self.device)
        with self._busy():
            self._is_compiled = True
            self._packing_share = 1.0 if self._packing_share else 0.0
            self._attach()
            if isinstance(self.target.steps, CapturedForward):
                self.target.steps.capture_at_once()
            kinds = self.accelerator.decoder_of_any.drafter.rehearse(self.target.device)
            with tqdm(desc="compiling") as bar, closing(kinds):
                for rows, plan in plans.items():
                    bar.write(f"batch size {rows}: {plan}", file=sys.stderr)
                for _ in kinds:
                    for example in (example for rows in batch_sizes for example in self._examples(rows)):
                        with closing(example.rounds()) as rounds:
                            for _ in zip(range(ROUNDS_TO_COMPILE), rounds, strict=False):
                                bar.update()
        return self

    def _plan_memory(self, rows: int) -> MemoryPlan:
        """Plan the memory of a call with this number of prompts or images, with guidance."""
        grid, drafter = self.target.grid, self.accelerator.drafter
        draft = getattr(drafter, "model", None)
        length = 0 if grid is None else self.target.layout_of(grid).length
        return MemoryPlan.of(
            self.target,
            rows if grid is None else 2 * rows,
            max(LEAST_CAPACITY, length),
            drafter.max_nodes,
            draft if draft is None or isinstance(draft, torch.nn.Module) else draft.model,
        )

    def _examples(self, rows: int) -> Sequence[Call | ImageCall]:
        """Prepare short calls with this number of prompts, with the usual sampling settings."""
        raise NotImplementedError

    def _attach(self) -> None:
        """Apply the settings for prefix caches, packed layers and compiled steps to target and drafter."""
        self._attach_prefill()
        self.target.packing.share = self._packing_share
        if self._compiles:
            if self.target.steps is None:
                self.target.compile()
            if self.target.steps is not None:  # the drafter calls parts of the target's steps
                self.accelerator.drafter.compile()

    @property
    def _compiles(self) -> bool:
        """Whether the steps of the model are compiled: `compile` was called, or graphs come without it."""
        if not has_graphs(self.target.device):
            return self._is_compiled
        mode, target = graphs_mode(), self.target
        is_usual = isinstance(target, CausalTarget) and not target.by_blocks and not is_offloaded(self.model)
        return mode != "off" and (self._is_compiled or (mode == "auto" and is_usual))

    def _attach_prefill(self) -> None:
        """Set the settings of prefills on every model that reads prompts, with a prefix cache if enabled."""
        for reader in (self.target, self.accelerator.drafter.reader):
            if reader is None or reader.vector_size:
                continue
            reader.prefill_tokens = self._prefill_tokens
            held = None if reader.prefix_cache is None else reader.prefix_cache.max_bytes
            if held != self._prefix_bytes:
                reader.prefix_cache = None if self._prefix_bytes is None else PrefixCache(self._prefix_bytes)

    def running_batch(self, rows: int = 8) -> RunningBatch:
        """Open a running batch (continuous batching): requests enter and leave between rounds.

        Each request has its own settings. The pipeline is busy until the batch is closed; use the batch in a
        `with` block.

        Args:
            rows: maximum number of rows that are decoded together.

        Returns:
            The open batch.

        Raises:
            InputError: `rows` is not a positive integer, or the model or accelerator cannot change rows
                during decoding.
            PipelineBusyError: a call is running.

        Example:
            >>> with pipe.running_batch(rows=4) as batch:  # doctest: +SKIP
            ...     handle = batch.enter("What is this?", images="scene.png", max_new_tokens=32)
            ...     while batch.handles:
            ...         for update in batch.step():
            ...             print(update.handle, update.tokens, update.output)
        """
        from mmspec.pipelines.running_batch import RunningBatch

        return RunningBatch(self, rows)

    def _prepare_request(
        self, prompt: object, arguments: Keywords
    ) -> tuple[Call, Callable[[Canvas], CallOutput]]:
        """Prepare a request of a running batch: a call, and a function from a canvas to the output."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the pipeline to a folder that `from_pretrained` loads.

        The folder is written completely or not at all.

        Raises:
            CheckpointError: the folder exists and is not empty, or cannot be written.
            MissingDependencyError: the model has adapters, and the installed peft is too old.
        """
        try:
            with new_folder(Path(folder), "folder", CheckpointError) as unfinished:
                self._write(unfinished)
        except OSError as error:
            rule = f"must be writable and have {bytes_of(self.model)} free bytes ({error.strerror})"
            raise CheckpointError("folder", str(folder), rule) from error

    def _write(self, folder: Path) -> None:
        """Save the parts to a folder."""
        save_model(self.model, folder)
        self.processor.save_pretrained(folder)

    def interrupt(self) -> None:
        """Stop the running call, from another thread or a callback, after at most one more round."""
        self._interrupted.set()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Lock the pipeline for one call; raise PipelineBusyError if another one is running."""
        if not self._lock.acquire(blocking=False):
            message = "this pipeline is already generating; close that call, or use one pipeline per thread"
            raise PipelineBusyError(message)
        self._interrupted.clear()
        try:
            yield
        finally:
            self._lock.release()


def pipeline_for(config: PreTrainedConfig) -> type[MMSpecPipeline]:
    """Return the pipeline class for a model; models of text and images get the one that generates text."""
    from mmspec.pipelines.speech import SpeechPipeline, is_speech_model
    from mmspec.pipelines.vision_language import VisionLanguagePipeline

    if is_speech_model(config):
        return SpeechPipeline
    family = family_of(config)
    if family is None or family.answers:
        return VisionLanguagePipeline
    kind: type[MMSpecPipeline] = load(DRAWING[family.draws])
    return kind
