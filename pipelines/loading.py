"""Checkpoints before their weights are loaded, and sorting of the keywords of `from_pretrained`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from transformers import BitsAndBytesConfig, PreTrainedConfig
from transformers.processing_utils import ImagesKwargs, VideosKwargs
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from mmspec.accelerators import options_of
from mmspec.errors import CheckpointError, InputError, UnknownArgumentError
from mmspec.models.adapters import Adapter, base_error, find_adapter
from mmspec.models.checkpoint import check_source, first_line, load_config, split_gguf
from mmspec.plugins import METHODS
from mmspec.registry import did_you_mean

__all__ = ["Checkpoint"]


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Keywords that select files, for config, processor and model.
WHERE = names(
    "revision token cache_dir local_files_only trust_remote_code force_download proxies subfolder "
    "code_revision gguf_file"
)
#: Keywords for loading the model into memory.
HOW = names(
    "dtype device_map max_memory offload_folder offload_buffers quantization_config variant "
    "use_safetensors weights_only state_dict generation_config attn_implementation experts_implementation "
    "tp_plan tp_size device_mesh distributed_config key_mapping use_kernels kernel_config "
    "allow_all_kernels tqdm_class fusion_config disable_mmap"
)
BITS = ("load_in_8bit", "load_in_4bit")  # older keywords of transformers for quantization_config
OF_BITS = ("llm_int8_", "bnb_4bit_")
GONE = "is not supported; transformers 5 ignores it"
PEFT = "is not supported; pass the folder or hub id of the adapter as the model"
REFUSED = {
    "low_cpu_mem_usage": "is not supported; transformers 5 ignores it and always loads this way",
    "offload_state_dict": GONE,
    "mirror": GONE,
    "from_tf": GONE,
    "from_flax": GONE,
    "ignore_mismatched_sizes": "is not supported; weights of another shape would be initialised randomly",
    "output_loading_info": "is not supported; mmspec checks the loaded weights itself",
    "return_unused_kwargs": "is not supported; an unused keyword is an error",
    "adapter_kwargs": PEFT,
    "adapter_name": PEFT,
}
#: Keywords of processors that their signatures do not list.
OF_IMAGES = {"use_fast", "backend"}
OF_TOKENIZERS = names(
    "padding_side truncation_side model_max_length chat_template clean_up_tokenization_spaces "
    "split_special_tokens extra_special_tokens additional_special_tokens add_bos_token add_eos_token "
    "add_prefix_space legacy tokenizer_type from_slow fix_mistral_regex"
) | set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
OF_A_CALL = {
    "return_tensors",
    "return_metadata",
    "device",
}  # listed with the others, but without effect at loading
OF_SOME = {"min_pixels", "max_pixels", "patch_size", "merge_size", "max_image_size", "do_image_splitting"}
OF_MANY = OF_IMAGES.union(OF_TOKENIZERS, OF_SOME, ImagesKwargs.__annotations__, VideosKwargs.__annotations__)
FIXED = {
    "model_type",
    "architectures",
    "transformers_version",
}  # entries of configs that cannot be overridden
NEAR = 0.75  # similarity of two names from which on one is a misspelling
PLACED = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that transformers computes


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and the keywords for loading it.

    Attributes:
        source: local folder or hub id of the model.
        where: keywords of transformers that select files, for config, processor and model.
        how: keywords of transformers for loading the model into memory.
        config: config of the model; None if it is to be read from `config_source`.
        config_source: local folder or hub id of the config; "" if the caller passed the config.
        adapter: the adapter that is loaded on top of the model, or None.
        options: keywords that are not keywords of transformers.
        reading: keywords for the processor alone.
    """

    source: str
    where: dict[str, Any]
    how: dict[str, Any]
    config: PreTrainedConfig | None
    config_source: str
    adapter: Adapter | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def look_at(cls, given: object, keywords: Mapping[str, Any]) -> Self:
        """Inspect a folder, a hub id, a GGUF file or an adapter.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
            InputError: a keyword of transformers has no effect or is not supported.
            MissingDependencyError: a package that reads the checkpoint is not installed.
        """
        place, inside = split_gguf(given)
        named = keywords.get("gguf_file")
        if inside and named is not None:
            raise InputError("gguf_file", named, f"must be None; {place} is a GGUF file already")
        source = check_source(place)
        where, how, config, others = sort_keywords({**keywords, **inside})
        adapter = None if "gguf_file" in where else find_adapter(source, **where)
        if adapter is not None:
            source = adapter.base
            apart = {"subfolder", "revision"}
            where = {name: value for name, value in where.items() if name not in apart}
            where |= {} if adapter.revision is None else {"revision": adapter.revision}
        config_source = source
        if isinstance(config, PreTrainedConfig):
            config_source = ""
        elif config is not None:
            config, config_source = None, check_source(config, "config")
        return cls(source, where, {"dtype": "auto", **how}, config, config_source, adapter, others)

    @contextmanager
    def reading_config(self) -> Iterator[dict[str, Any]]:
        """Yield the keywords for reading the config; an error names the adapter whose base is missing."""
        try:
            pickles, variant = self.how.get("use_safetensors") is False, self.how.get("variant")
            yield {**self.where, "pickles": pickles, "variant": variant}
        except CheckpointError as error:
            raise error if self.adapter is None else base_error(self.adapter, error) from error

    @property
    def folder(self) -> Path:
        """Folder of the model's files; it does not exist for a hub id."""
        if self.adapter is not None:
            return self.adapter.folder
        return Path(self.source, self.where.get("subfolder") or "").absolute()

    @property
    def model_config(self) -> PreTrainedConfig:
        """The config, after it was read."""
        if self.config is None:
            raise CheckpointError("config", None, f"must be read from {self.config_source} first")
        return self.config

    def sorted(self, accelerator: str, names: Iterable[str], reader: Callable[[Self], Any]) -> Self:
        """Separate options of an accelerator, with these names, from keywords of the processor and config.

        Raises:
            UnknownArgumentError: a keyword is unknown; the message names the nearest one.
        """
        names = set(names)
        rest = {name: value for name, value in self.options.items() if name not in names}
        if not rest:
            return self
        of_config, processor = set(self.model_config.to_dict()) - FIXED, reader(self)
        of_processor = set() if processor is None else processor_keywords(processor)
        for name, value in rest.items():
            if name not in of_processor | of_config:
                raise unknown_keyword(name, value, accelerator, names)
        config = self.config
        if changed := {name: value for name, value in rest.items() if name in of_config}:
            if not self.config_source:
                name, value = next(iter(changed.items()))
                raise InputError(name, value, "cannot be combined with config=...; set it in the config")
            with self.reading_config() as where:
                config = load_config(self.config_source, **where, **changed)
        return replace(
            self,
            config=config,
            options={name: value for name, value in self.options.items() if name in names},
            reading={name: value for name, value in rest.items() if name in of_processor},
        )

    @property
    def reader(self) -> tuple[str, dict[str, Any]]:
        """Folder or hub id of the processor or tokenizer, and keywords that select its files."""
        if self.adapter is not None and self.adapter.has_reader(self.model_config):
            return str(self.adapter.folder), {}
        return self.source, self.where


def sort_keywords(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], Any, dict[str, Any]]:
    """Sort keywords into those of transformers and others.

    Returns:
        The keywords that select files, those for loading the model into memory, the config (or its location),
        and the others: options of an accelerator, or keywords of the processor or config.

    Raises:
        InputError: a keyword has no effect or is not supported, or values contradict each other.
    """
    where: dict[str, Any] = {}
    how: dict[str, Any] = {}
    bits: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in given.items():
        if value is None and name in WHERE | HOW | set(REFUSED):
            continue  # None means not given
        if name in REFUSED:
            raise InputError(name, value, REFUSED[name])
        if name in BITS or name.startswith(OF_BITS):
            bits[name] = value
        elif name != "config":
            (where if name in WHERE else how if name in HOW else others)[name] = value
    if any(bits.get(name) for name in BITS):
        if how.get("quantization_config") is not None:
            raise InputError(next(iter(bits)), True, "cannot be combined with quantization_config")
        try:
            how["quantization_config"] = BitsAndBytesConfig(**bits)
        except (TypeError, ValueError) as error:
            raise InputError("quantization_config", bits, f"cannot be used: {first_line(error)}") from error
    elif further := [name for name in bits if name not in BITS]:
        raise InputError(further[0], bits[further[0]], "needs load_in_4bit=True or load_in_8bit=True")
    check_placement(how)
    check_pickles(how)
    check_quantizer(how)
    return where, how, given.get("config"), others


def check_placement(how: Mapping[str, Any]) -> None:
    """Refuse keywords that have no effect with the given `device_map`."""
    device_map = how.get("device_map")
    is_made = isinstance(device_map, str) and device_map in PLACED
    places = set(device_map.values()) if isinstance(device_map, Mapping) else set()
    if how.get("max_memory") is not None and not is_made:
        rule = "needs device_map='auto' (or balanced, balanced_low_0, sequential)"
        raise InputError("max_memory", how["max_memory"], rule)
    for name, away in (("offload_folder", {"disk"}), ("offload_buffers", {"cpu", "disk"})):
        if how.get(name) and not is_made and not places & away:
            parts = f"a device_map with parts on the {' or '.join(sorted(away))}"
            raise InputError(name, how[name], f"needs device_map='auto', or {parts}")


def check_pickles(how: Mapping[str, Any]) -> None:
    """Refuse to load pickles that can run code, which transformers allows."""
    if not how.get("weights_only", True):
        raise InputError("weights_only", False, "must be True; pickles that can run code are not loaded")
    given = how.get("use_safetensors")
    if given is not None and not isinstance(given, bool):
        raise InputError("use_safetensors", given, "must be True, or False for pickles of tensors alone")


def check_quantizer(how: Mapping[str, Any]) -> None:
    """Raise InputError, with the quantiser's own message, if the quantiser is not available here."""
    asked = how.get("quantization_config")
    if asked is None:
        return
    try:
        quantizer = AutoHfQuantizer.from_config(asked, pre_quantized=False)
        quantizer.validate_environment(device_map=how.get("device_map"), dtype=how.get("dtype"))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        shown = asked if isinstance(asked, dict) else type(asked).__name__
        raise InputError("quantization_config", shown, f"cannot be used: {first_line(error)}") from error


def processor_keywords(processor: Any) -> set[str]:
    """Return the keywords that have an effect when a processor or tokenizer is loaded."""
    tokenizer = getattr(processor, "tokenizer", processor)
    names = set(OF_TOKENIZERS) | set(getattr(tokenizer, "init_kwargs", ()))
    for kind in ("image_processor", "video_processor"):
        part = getattr(processor, kind, None)
        valid = getattr(part, "valid_kwargs", None)
        if part is not None:
            names |= OF_IMAGES | set(getattr(valid, "__annotations__", ()))
    return names - OF_A_CALL


def unknown_keyword(name: str, value: Any, accelerator: str, options: Iterable[str]) -> InputError:
    """Make the error for an unknown keyword: of loading or of the accelerator, whichever is more similar."""
    options = set(options)
    others = set().union(*map(options_of, METHODS.values()))
    if name in OF_MANY - others:
        rule = "must be known to the processor or the config of this checkpoint"
        return UnknownArgumentError("keyword of loading", name, rule)
    loading = WHERE | HOW | set(BITS) | OF_MANY | {"config", "torch_dtype", "drafter", "accelerator"}
    near = difflib.get_close_matches(name, sorted(loading | options | others), n=1, cutoff=NEAR)
    if near and near[0] in loading - others:
        rule = f"must be a keyword of transformers' from_pretrained (did you mean {near[0]!r}?)"
        return UnknownArgumentError("keyword of loading", name, rule)
    rule = f"{did_you_mean(name, options)}, or a keyword of transformers' from_pretrained"
    return UnknownArgumentError(f"option of accelerator {accelerator!r}", name, rule)
