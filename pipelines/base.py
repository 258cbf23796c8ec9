"""MMSpecPipeline: loading, swapping accelerators, saving, interrupting. Subclasses generate."""

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
)
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
from mmspec.targets.steps import LEAST_CAPACITY
from mmspec.targets.vision_language import AUTOREGRESSIVE, check_mode
from mmspec.validation import given_of, is_integer, require_number

if TYPE_CHECKING:
    from mmspec.pipelines.image_generation import ImageCall
    from mmspec.pipelines.running_batch import RunningBatch

logger = logging.getLogger(__name__)
register_families()
#: Pipelines of models that draw, by what they draw.
DRAWING = {
    "tokens": "mmspec.pipelines.image_tokens:ImagePipeline",
    "vectors": "mmspec.pipelines.continuous_images:ContinuousImagePipeline",
}

TUNED_FOR = {"batch_size", "tv"}
DEFAULT_PREFIX_BYTES = 2 * 2**30
OWN_TO_EACH = {"target", "_lock", "_interrupted"}
ROUNDS_TO_COMPILE = 3  # of the prompts, of the first draft, and of another of its shape

#: As transformers takes it: a name, a device, or where each module goes.
DeviceMap: TypeAlias = str | int | torch.device | Mapping[str, str | int | torch.device] | None


class MMSpecPipeline:
    """A model with an accelerator.

    Use `MMSpecPipeline.from_pretrained`, which returns the subclass for the checkpoint.

    Attributes:
        default_accelerator: what is used where none is named; of a class, and of its pipelines where their
            models allow it.
        model: the transformers model.
        processor: its processor, or tokenizer for a model without images.
        target: the model behind the Target interface.
        accelerator: what `set_accelerator` made.
        media_limits: limits on images and videos; replace it to change them.
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

        Called on a subclass it returns that one: `ImagePipeline.from_pretrained` draws with models that also
        answer (Janus, Emu3, Chameleon). `MMSpecPipeline.from_pretrained` answers with those.

        Args:
            pretrained_model_name_or_path: a local folder or hub id, a GGUF file, or an adapter (LoRA), which
                peft loads over its base.
            accelerator: a name from `mmspec.list_accelerators()`, or "auto", as of `set_accelerator`, with or
                without options (`"copy:num_draft_tokens=8"`); None is the pipeline's default.
            drafter: folder or id of the draft model, or a loaded one, for accelerators that need one; None
                takes the one that `drafters.json` in the model's folder names.
            mode: of a model that was trained to fill masked blocks and to predict the next token: "blocks",
                the default, or "autoregressive".
            vq, text_encoder, vae: folder or id of a part of an image model that has no subfolder of its own.
            dtype: as in transformers; `torch_dtype` is its older name.
            device_map, attn_implementation, revision, token, cache_dir, local_files_only,
                trust_remote_code: passed through to transformers.
            options: options of the accelerator (`num_draft_tokens=8`, `acceptance="..."`), and other keywords
                of transformers: for the model (`quantization_config`), its files (`subfolder`), its processor
                (`max_pixels`) or its config.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or does not fit.
            UnsupportedModelError: the model cannot be decoded speculatively.
            InputError: unknown accelerator, or a keyword that nothing knows, that would not act, or is out of
                range; raised before weights are read.
            MissingDependencyError: a package that reads the checkpoint is not installed.
        """
        # all that can be is checked before weights are read: a typo should not cost a load
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
        found, fitting = kind._check_accelerator(found, accelerator, drafter, mode)
        loaded = kind._load_parts(found, given_of(vq=vq, text_encoder=text_encoder, vae=vae))
        model = loaded["model"]
        if found.adapter is not None:
            load_adapter(model, found.adapter)
        logger.info("target: %.1f MB of weights, %s", bytes_of(model) / 1e6, model.dtype)
        if isinstance(fitting, PreTrainedModel) and not isinstance(drafter, PreTrainedModel):
            place_head(fitting, model.dtype, execution_device(model))  # it was loaded first
        given = given_of(drafter=fitting, mode=mode)
        pipe = kind(**loaded, accelerator=accelerator, **found.options, **given)
        pipe._folder = found.folder
        return pipe

    @classmethod
    def _check_accelerator(
        cls, found: Checkpoint, name: str | None, drafter: DrafterSource | None, mode: str | None
    ) -> tuple[Checkpoint, DrafterSource | None]:
        """Check the accelerator before weights are read; returns the checkpoint, sorted, and what drafts."""
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
        """Load the processor, or tokenizer; None where the checkpoint has none that takes keywords."""
        source, where = found.reader
        return load_processor(source, found.model_config, **where, **reading)

    @classmethod
    def _preset(cls, config: PreTrainedConfig, name: str) -> str:
        """The name of the preset that an accelerator is run as, without a drafter, for such a model."""
        family = family_of(config)
        return name if family is None else family.presets.get(name, name)

    @classmethod
    def _default_for(cls, config: PreTrainedConfig, mode: str | None = None) -> str:
        """The name of what is used for such a model where none is named."""
        if mode == AUTOREGRESSIVE:
            return "self_speculation"
        family = family_of(config)
        return cls.default_accelerator if family is None or not family.accelerator else family.accelerator

    @classmethod
    def _kind_for(cls, config: PreTrainedConfig) -> type[MMSpecPipeline]:
        """Choose the class for a model: this one, unless it is a base class."""
        return pipeline_for(config) if cls is MMSpecPipeline else cls

    @classmethod
    def _load_parts(cls, found: Checkpoint, parts: dict[str, str | Path]) -> Keywords:
        """Load the constructor's arguments; `parts` says where those lie that are not in the checkpoint."""
        config = found.model_config
        family = family_of(config)
        if family is not None and family.draws == "tokens" and not family.answers:
            message = "a LlamaGen model draws and does not answer: use ImagePipeline, or mmspec generate"
            raise UnsupportedModelError(message)
        if parts:
            raise InputError(*next(iter(parts.items())), f"nothing: {config.model_type} has no such part")
        return {
            "processor": cls._reader(found, **found.reading),
            "model": load_model(found.source, config, **found.where, **found.how),
        }

    def _adapt(self, model: PreTrainedModel) -> CausalTarget:
        """Adapt the model to the Target interface."""
        return adapt(model, self.mode)

    def _check_parts(self) -> None:
        """Raise CheckpointError if the parts do not fit each other."""
        check_vocabulary(self.tokenizer, self.model)

    def set_accelerator(
        self,
        accelerator: str | Accelerator,
        *,
        drafter: DrafterSource | None = None,
        **options: Any,
    ) -> Self:
        """Swap the method on the loaded model.

        Args:
            accelerator: a name from `mmspec.list_accelerators()`, alone or with options as on the command
                line, such as "sjd:window=16"; or what a function of `mmspec.accelerators` returns, such as
                `sjd(window=16)`; or "auto" for what `mmspec tune`
                found best for this model on this device, with the options `batch_size` (1) and `tv` (0) that
                it was tuned for.
            drafter: folder, hub id or loaded model, for names that need a draft model or a head; None takes
                the one that `drafters.json` names in the folder that the pipeline was loaded from.
            options: of the named accelerator and of its rule; `acceptance` names another rule.

        Raises:
            InputError: unknown name or option, a value out of range, or an unsound pairing.
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
                    allowed = "nothing: options go into the function that made the accelerator"
                    raise InputError(name, value, allowed)
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
        """Build the accelerator of a name, and the processor of its draft model if that has its own."""
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
        """Load the draft model, and its processor; None if it reads what the target reads."""
        if isinstance(drafter, PreTrainedModel):
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
        """Choose the processor for a loaded draft model: the tokenizer if it alone reads only text."""
        return self.tokenizer if type(draft) is not type(self.target) else None

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def tokenizer(self) -> Processor:
        return tokenizer_of(self.processor)

    @property
    def components(self) -> dict[str, object]:
        """The parts, as diffusers names them."""
        return {"model": self.model, "processor": self.processor}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the model, and the draft model if there is one.

        Raises:
            InputError: parts of the model are offloaded, and stay where `device_map` put them.
            PipelineBusyError: a call is running.
        """
        with self._busy():
            parts = [part for part in self.components.values() if isinstance(part, torch.nn.Module)]
            if any(map(is_offloaded, parts)):
                allowed = "nothing: parts of the model are offloaded; load it with another device_map"
                raise InputError("to", args or kwargs, allowed)
            for part in parts:
                part.to(*args, **kwargs)
            self.target = self._adapt(self.model)
            self.accelerator.drafter.to(*args, **kwargs)
            self.accelerator = self.accelerator.fit(self.target)
            self._attach()
        return self

    def __getstate__(self) -> Keywords:
        """State for copies: everything but the target, the lock and the flag, which each pipeline creates."""
        return {name: value for name, value in vars(self).items() if name not in OWN_TO_EACH}

    def __setstate__(self, state: Keywords) -> None:
        vars(self).update(state)
        self._lock, self._interrupted = threading.Lock(), threading.Event()
        self.target = self._adapt(self.model)
        self.accelerator = self.accelerator.fit(self.target)
        self._attach()

    def enable_prefix_cache(self, max_bytes: int = DEFAULT_PREFIX_BYTES) -> None:
        """Keep the prefill of prompts; later ones that begin alike, images included, read only the rest.

        Made for conversations, and for several questions about one image. Outputs are those of a fresh
        run, up to the rounding of the rest being read by itself. A draft model has a cache of the same size
        of its own. `to` empties them. Weights, adapters or options of modules that have changed make them
        miss; while a hook or a `forward` of your own is set on the model, prompts are read whole. Writes to a
        few rows through `tensor.data` go unseen: call this again after `disable_prefix_cache` then.

        Args:
            max_bytes: memory for keys, values, hidden states and images; what was used longest ago goes
                first.

        Raises:
            InputError: the limit is no positive integer, or the model draws continuous tokens or is masked.
            PipelineBusyError: a call is running.
        """
        if self.target.vector_size:
            raise InputError("prefix cache", max_bytes, "none: prompts of continuous images are short")
        if self.target.by_blocks:
            raise InputError("prefix cache", max_bytes, "none: a masked model keeps no keys of prompts alone")
        with self._busy():
            self._prefix_bytes = PrefixCache(max_bytes).max_bytes
            self._attach_prefix_caches()

    def disable_prefix_cache(self) -> None:
        """Read every prompt from its beginning again, and free the memory.

        Raises:
            PipelineBusyError: a call is running.
        """
        with self._busy():
            self._prefix_bytes = None
            self._attach_prefix_caches()

    def enable_packing(self, share: float = SHARE) -> None:
        """On a CPU, keep packed copies of the linear layers, which is on by default.

        Forward passes of several tokens then take little longer than those of one. Layers are packed when
        they are first used so, as long as all packed copies of the process are within a share of the memory
        that is free without them. A layer whose weights change is packed again in the next call.

        Args:
            share: from 0 to 1; `compile` makes it 1, unless packing is disabled.

        Raises:
            InputError: a share outside its range.
            PipelineBusyError: a call is running.
        """
        require_number("share", share, 0, 1, "a number from 0 to 1")
        with self._busy():
            self._packing_share = float(share)
            self._attach()

    def disable_packing(self) -> None:
        """Keep no packed copies, and free those that there are in the next call.

        Raises:
            PipelineBusyError: a call is running.
        """
        self.enable_packing(0.0)

    def compile(self, batch_sizes: Sequence[int] = (1,)) -> Self:
        """Compile decoding steps, of the model and of a draft model; outputs stay the same up to rounding.

        Takes seconds on a GPU, where steps are captured in CUDA graphs, and a minute or so on a CPU, where
        torch.compile needs a C++ compiler. Prints the memory that is planned for each batch size.

        Stays in force after `set_accelerator` and `to`: shapes that are met for the first time are compiled
        then. Where something cannot be compiled, a warning of the logger `mmspec` names it, and it runs as
        before.

        Args:
            batch_sizes: numbers of prompts, or images, to compile for now.

        Raises:
            InputError: a batch size is no positive integer, or needs more memory than a GPU has left.
            PipelineBusyError: a call is running.
        """
        for rows in batch_sizes:
            if not is_integer(rows) or rows < 1:
                raise InputError("batch_sizes", batch_sizes, "positive integers")
        plans = {rows: self._plan_memory(rows) for rows in batch_sizes}
        for rows, plan in plans.items():
            plan.check(rows, self.device)
        with self._busy():
            self._is_compiled = True
            self._packing_share = 1.0 if self._packing_share else 0.0
            self._attach()
            with tqdm(total=len(batch_sizes) * ROUNDS_TO_COMPILE, desc="compiling") as bar:
                for rows in batch_sizes:
                    bar.write(f"batch size {rows}: {plans[rows]}", file=sys.stderr)
                    with closing(self._example(rows).rounds()) as rounds:
                        for _ in zip(range(ROUNDS_TO_COMPILE), rounds, strict=False):
                            bar.update()
        return self

    def _plan_memory(self, rows: int) -> MemoryPlan:
        """Plan the memory of a call of that many prompts, or images, with guidance."""
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

    def _example(self, rows: int) -> Call | ImageCall:
        """Prepare a short call of that many prompts."""
        raise NotImplementedError

    def _attach(self) -> None:
        """Attach what was asked for to target and drafter: prefix caches, packed layers, compiled steps."""
        self._attach_prefix_caches()
        self.target.packing.share = self._packing_share
        if self._is_compiled:
            if self.target.steps is None:
                self.target.compile()
            if self.target.steps is not None:  # else it cannot be: what drafts for it calls parts of it
                self.accelerator.drafter.compile()

    def _attach_prefix_caches(self) -> None:
        """Attach the prefix caches that were asked for to every model that reads prompts."""
        for reader in (self.target, self.accelerator.drafter.reader):
            if reader is None or reader.vector_size:
                continue
            held = None if reader.prefix_cache is None else reader.prefix_cache.max_bytes
            if held != self._prefix_bytes:
                reader.prefix_cache = None if self._prefix_bytes is None else PrefixCache(self._prefix_bytes)

    def running_batch(self, rows: int = 8) -> RunningBatch:
        """Open a batch that requests enter and leave between rounds, each with settings of its own.

        The pipeline is busy until the batch is closed; use it in a `with` block.

        Args:
            rows: most rows that are decoded together.

        Raises:
            InputError: rows is no positive integer, or rows of this model or accelerator stay together until
                all have ended.
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
        """Prepare a request of a running batch: a call, and a function that makes its output of a canvas."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that `from_pretrained` loads; all of it or nothing.

        Raises:
            CheckpointError: the folder exists and holds files, or cannot be written.
            MissingDependencyError: the model has adapters, and peft is too old for this transformers.
        """
        try:
            with new_folder(Path(folder), "folder", CheckpointError) as unfinished:
                self._write(unfinished)
        except OSError as error:
            allowed = f"{bytes_of(self.model)} free bytes ({error.strerror})"
            raise CheckpointError("folder", str(folder), allowed) from error

    def _write(self, folder: Path) -> None:
        """Write the parts into a folder."""
        save_model(self.model, folder)
        self.processor.save_pretrained(folder)

    def interrupt(self) -> None:
        """Stop a running call, from another thread or a callback: at most one more round is decoded."""
        self._interrupted.set()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Hold the pipeline for one call; a second one at the same time is an error, not a corruption."""
        if not self._lock.acquire(blocking=False):
            message = "this pipeline is generating already; finish or close that call, or use one per thread"
            raise PipelineBusyError(message)
        self._interrupted.clear()
        try:
            yield
        finally:
            self._lock.release()


def pipeline_for(config: PreTrainedConfig) -> type[MMSpecPipeline]:
    """Choose the pipeline class for a model; one that both answers and draws gets the one that answers."""
    from mmspec.pipelines.vision_language import VisionLanguagePipeline

    family = family_of(config)
    if family is None or family.answers:
        return VisionLanguagePipeline
    kind: type[MMSpecPipeline] = load(DRAWING[family.draws])
    return kind


def tokenizer_of(processor: Processor) -> Processor:
    """The tokenizer inside a processor, or the tokenizer itself."""
    return getattr(processor, "tokenizer", processor)
