"""A checkpoint before its weights are loaded, and where each keyword of `from_pretrained` goes."""

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


#: Which files: for config, processor and model alike.
WHERE = names(
    "revision token cache_dir local_files_only trust_remote_code force_download proxies subfolder "
    "code_revision gguf_file"
)
#: How the model is put into memory.
HOW = names(
    "dtype device_map max_memory offload_folder offload_buffers quantization_config variant "
    "use_safetensors weights_only state_dict generation_config attn_implementation experts_implementation "
    "tp_plan tp_size device_mesh distributed_config key_mapping use_kernels kernel_config "
    "allow_all_kernels tqdm_class fusion_config disable_mmap"
)
BITS = ("load_in_8bit", "load_in_4bit")  # of older transformers, for quantization_config
OF_BITS = ("llm_int8_", "bnb_4bit_")
GONE = "nothing: transformers 5 drops it without a word"
PEFT = "nothing: name the folder or hub id of the adapter, which knows its base"
REFUSED = {
    "low_cpu_mem_usage": "nothing: transformers 5 always loads so, and drops it without a word",
    "offload_state_dict": GONE,
    "mirror": GONE,
    "from_tf": GONE,
    "from_flax": GONE,
    "ignore_mismatched_sizes": "nothing: weights of another shape would be made up",
    "output_loading_info": "nothing: what was loaded is checked here",
    "return_unused_kwargs": "nothing: a keyword without a use is an error here",
    "adapter_kwargs": PEFT,
    "adapter_name": PEFT,
}
#: Of processors, where their own signatures do not list them.
OF_IMAGES = {"use_fast", "backend"}
OF_TOKENIZERS = names(
    "padding_side truncation_side model_max_length chat_template clean_up_tokenization_spaces "
    "split_special_tokens extra_special_tokens additional_special_tokens add_bos_token add_eos_token "
    "add_prefix_space legacy tokenizer_type from_slow fix_mistral_regex"
) | set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
OF_A_CALL = {"return_tensors", "return_metadata", "device"}  # listed with the others, and no use at loading
OF_SOME = {"min_pixels", "max_pixels", "patch_size", "merge_size", "max_image_size", "do_image_splitting"}
OF_MANY = OF_IMAGES.union(OF_TOKENIZERS, OF_SOME, ImagesKwargs.__annotations__, VideosKwargs.__annotations__)
FIXED = {"model_type", "architectures", "transformers_version"}  # of configs: not to be overridden
NEAR = 0.75  # of two names: a misspelling
PLACED = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that transformers makes itself


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was looked at, and how it is to be loaded.

    Attributes:
        source: local folder or hub id of the model.
        where: keywords of transformers that say which files, for config, processor and model.
        how: those that say how the model is put into memory.
        config: of the model; None where it is to be read from `config_source`.
        config_source: local folder or hub id of the config; "" where the caller gave it.
        adapter: what is put over the model, if anything is.
        options: keywords that are not transformers' own.
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
        """Look at a folder, a hub id, a GGUF file or an adapter.

        Raises:
            CheckpointError: it is missing or damaged.
            InputError: a keyword of transformers that would have no effect, or cannot work here.
            MissingDependencyError: a package that reads it is not installed.
        """
        place, inside = split_gguf(given)
        named = keywords.get("gguf_file")
        if inside and named is not None:
            raise InputError("gguf_file", named, f"nothing: {place} is one already")
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
        """Yield the keywords for reading the config; an error names the adapter whose base is not there."""
        try:
            pickles, variant = self.how.get("use_safetensors") is False, self.how.get("variant")
            yield {**self.where, "pickles": pickles, "variant": variant}
        except CheckpointError as error:
            raise error if self.adapter is None else base_error(self.adapter, error) from error

    @property
    def folder(self) -> Path:
        """Folder of the files that belong to the model; one that does not exist for a hub id."""
        if self.adapter is not None:
            return self.adapter.folder
        return Path(self.source, self.where.get("subfolder") or "").absolute()

    @property
    def model_config(self) -> PreTrainedConfig:
        """The config, once it was read."""
        if self.config is None:
            raise CheckpointError("config", None, f"that of {self.config_source}")
        return self.config

    def sorted(self, accelerator: str, names: Iterable[str], reader: Callable[[Self], Any]) -> Self:
        """Tell options of an accelerator, of those names, from keywords of this processor and config.

        Raises:
            UnknownArgumentError: nothing knows one of them; the message names what is nearest.
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
                raise InputError(*next(iter(changed.items())), "nothing beside config=..., which says it")
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
        """Location of the processor or tokenizer, beside an adapter if there, and which files."""
        if self.adapter is not None and self.adapter.has_reader(self.model_config):
            return str(self.adapter.folder), {}
        return self.source, self.where


def sort_keywords(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], Any, dict[str, Any]]:
    """Tell keywords of transformers apart, and from others.

    Returns:
        Those that say which files, those that say how the model is put into memory, the config (or where it
        lies), and what remains: options of an accelerator, or keywords of this processor or config.

    Raises:
        InputError: one that would have no effect, or values that contradict each other or cannot work here.
    """
    where: dict[str, Any] = {}
    how: dict[str, Any] = {}
    bits: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in given.items():
        if value is None and name in WHERE | HOW | set(REFUSED):
            continue  # as if it were not there
        if name in REFUSED:
            raise InputError(name, value, REFUSED[name])
        if name in BITS or name.startswith(OF_BITS):
            bits[name] = value
        elif name != "config":
            (where if name in WHERE else how if name in HOW else others)[name] = value
    if any(bits.get(name) for name in BITS):
        if how.get("quantization_config") is not None:
            raise InputError(next(iter(bits)), True, "either this or quantization_config")
        try:
            how["quantization_config"] = BitsAndBytesConfig(**bits)
        except (TypeError, ValueError) as error:
            raise InputError("quantization_config", bits, first_line(error)) from error
    elif further := [name for name in bits if name not in BITS]:
        raise InputError(further[0], bits[further[0]], "with load_in_4bit=True or load_in_8bit=True")
    check_placement(how)
    check_pickles(how)
    check_quantizer(how)
    return where, how, given.get("config"), others


def check_placement(how: Mapping[str, Any]) -> None:
    """Refuse keywords that act only beside a `device_map` which leaves something to them."""
    device_map = how.get("device_map")
    is_made = isinstance(device_map, str) and device_map in PLACED
    places = set(device_map.values()) if isinstance(device_map, Mapping) else set()
    if how.get("max_memory") is not None and not is_made:
        allowed = "nothing without device_map='auto' (or balanced, balanced_low_0, sequential)"
        raise InputError("max_memory", how["max_memory"], allowed)
    for name, away in (("offload_folder", {"disk"}), ("offload_buffers", {"cpu", "disk"})):
        if how.get(name) and not is_made and not places & away:
            parts = f"one that leaves parts on the {' or '.join(sorted(away))}"
            allowed = f"nothing without device_map='auto', or {parts}"
            raise InputError(name, how[name], allowed)


def check_pickles(how: Mapping[str, Any]) -> None:
    """Refuse pickles that run code, which transformers would load where it is told to."""
    if not how.get("weights_only", True):
        raise InputError("weights_only", False, "True: pickles that run code are not loaded")
    given = how.get("use_safetensors")
    if given is not None and not isinstance(given, bool):
        raise InputError("use_safetensors", given, "True, or False for pickles of tensors alone")


def check_quantizer(how: Mapping[str, Any]) -> None:
    """Raise InputError, with the quantiser's own message, if it cannot work here."""
    asked = how.get("quantization_config")
    if asked is None:
        return
    try:
        quantizer = AutoHfQuantizer.from_config(asked, pre_quantized=False)
        quantizer.validate_environment(device_map=how.get("device_map"), dtype=how.get("dtype"))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        shown = asked if isinstance(asked, dict) else type(asked).__name__
        raise InputError("quantization_config", shown, first_line(error)) from error


def processor_keywords(processor: Any) -> set[str]:
    """Keywords that act on a processor, or tokenizer, when it is loaded."""
    tokenizer = getattr(processor, "tokenizer", processor)
    names = set(OF_TOKENIZERS) | set(getattr(tokenizer, "init_kwargs", ()))
    for kind in ("image_processor", "video_processor"):
        part = getattr(processor, kind, None)
        valid = getattr(part, "valid_kwargs", None)
        if part is not None:
            names |= OF_IMAGES | set(getattr(valid, "__annotations__", ()))
    return names - OF_A_CALL


def unknown_keyword(name: str, value: Any, accelerator: str, options: Iterable[str]) -> InputError:
    """The error for a keyword that nothing knows: of loading, or of the accelerator, whichever is nearer."""
    options = set(options)
    others = set().union(*map(options_of, METHODS.values()))
    if name in OF_MANY - others:
        allowed = "nothing: neither the processor nor the config of this checkpoint knows it"
        return UnknownArgumentError("keyword of loading", name, allowed)
    loading = WHERE | HOW | set(BITS) | OF_MANY | {"config", "torch_dtype", "drafter", "accelerator"}
    near = difflib.get_close_matches(name, sorted(loading | options | others), n=1, cutoff=NEAR)
    if near and near[0] in loading - others:
        allowed = f"did you mean {near[0]!r}? keywords are those of transformers' from_pretrained"
        return UnknownArgumentError("keyword of loading", name, allowed)
    allowed = f"{did_you_mean(name, options)}; or keywords of transformers' from_pretrained"
    return UnknownArgumentError(f"option of accelerator {accelerator!r}", name, allowed)
