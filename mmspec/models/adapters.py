"""Adapters (LoRA and similar): loaded onto their base model with peft, as transformers does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_peft_available

from mmspec.errors import CheckpointError, InputError, MissingDependencyError, UnsupportedModelError
from mmspec.models.checkpoint import MAX_CONFIG_BYTES, first_line, listing, next_step, read_json
from mmspec.models.local_paths import is_path
from mmspec.models.weights import is_finite, is_offloaded, stored_weights
from mmspec.open_types import Keywords

__all__ = ["Adapter", "find_adapter", "load_adapter", "load_lora", "save_model", "use_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")  # of an adapter that requests choose
BEYOND_LORA = ("modules_to_save", "trainable_token_indices", "bias")
PROCESSORS, TOKENIZERS = ("processor_config.json", "preprocessor_config.json"), ("tokenizer_config.json",)


@dataclass(frozen=True)
class Adapter:
    """An adapter and the model that it was trained for.

    Attributes:
        folder: folder of the adapter.
        base: folder or hub id of the base model.
        revision: revision of the base model; None for the newest.
    """

    folder: Path
    base: str
    revision: str | None

    def has_reader(self, config: PreTrainedConfig) -> bool:
        """True if the processor, or the tokenizer of a text model, was saved beside the adapter."""
        files = PROCESSORS if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else TOKENIZERS
        return any((self.folder / name).is_file() for name in files)


def find_adapter(source: str, **where: object) -> Adapter | None:
    """Return the adapter in a folder or hub repository; None if there is none.

    Args:
        source: local folder or hub id.
        where: keywords of transformers that select the files, such as `revision`.

    Raises:
        CheckpointError: the adapter names no base model, or the base or the weights are missing.
        MissingDependencyError: peft is not installed.
        UnsupportedModelError: the adapter is a trained prompt, not a change of weights.
    """
    path = locate(source, CONFIG, where)
    if path is None:
        return None
    table = read_json(path, MAX_CONFIG_BYTES)
    base = table.get(BASE) if isinstance(table, dict) else None
    if not isinstance(base, str) or not base:
        rule = "must be the folder or hub id of the model that the adapter was trained for"
        raise CheckpointError(f"{path}: {BASE}", base, rule)
    if "num_virtual_tokens" in table or table.get("peft_type") == "ADAPTION_PROMPT":
        raise UnsupportedModelError(
            f"{source} is an adapter of kind {table.get('peft_type')!r}, which is a trained prompt and not a "
            "change of weights; use LoRA or a similar kind"
        )
    if not is_peft_available():
        raise MissingDependencyError(
            f"{source} is an adapter for {base}, which needs peft: pip install peft, or merge the adapter "
            "into its base (merge_and_unload of peft, then save_pretrained)"
        )
    if locate(source, WEIGHTS, where) is None:
        rule = f"is an adapter without {WEIGHTS}; save it with peft, which writes this file by default"
        raise CheckpointError("model", source, rule)
    return Adapter(path.parent, find_base(path, base), table.get("revision") or None)


def locate(source: str, name: str, where: Keywords) -> Path | None:
    """The path of a file in a folder or hub repository; None if it is missing or cannot be downloaded."""
    folder = Path(source) / (where.get("subfolder") or "")
    if Path(source).is_dir():
        return folder / name if (folder / name).is_file() else None
    known = {key: value for key, value in where.items() if key not in ("trust_remote_code", "gguf_file")}
    try:
        found = cached_file(
            source,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **known,
        )
    except (OSError, ValueError, HFValidationError):  # `load_config`, which runs next, reports the cause
        return None
    return None if found is None else Path(found)


def find_base(path: Path, base: str) -> str:
    """The base that a config names: a folder relative to the adapter's, one relative to here, or a hub id."""
    places = [path.parent / base, Path(base).expanduser()]
    if (found := next((place for place in places if place.is_dir()), None)) is not None:
        return str(found)
    if is_path(base):
        rule = "must be a hub id, or a folder that exists, relative to the adapter's folder or to this one"
        raise CheckpointError(f"{path}: {BASE}", base, rule)
    return base


def base_error(adapter: Adapter, error: Exception) -> CheckpointError:
    """The error for a base that cannot be opened."""
    cause = error.__cause__
    reason = f"cannot be opened: {first_line(error)}"
    rule = next_step(cause, Path(adapter.base)) if isinstance(cause, OSError) else reason
    return CheckpointError(f"{adapter.folder / CONFIG}: {BASE}", adapter.base, rule)


def load_adapter(model: PreTrainedModel, adapter: Adapter, name: str | None = None) -> None:
    """Load an adapter onto its base model; every weight must be present and finite.

    Args:
        model: the base model.
        adapter: the adapter, which acts from now on.
        name: name for `use_adapter`; None for peft's own.

    Raises:
        CheckpointError: the adapter does not fit the model, or is damaged.
        InputError: parts of the model are offloaded.
    """
    if is_offloaded(model):
        rule = "must keep a model with an adapter in memory; or merge the adapter first (merge_and_unload)"
        raise InputError("device_map", "parts on the CPU or the disk", rule)
    before = {name for name, _ in model.named_parameters()}
    try:
        with safe_open(adapter.folder / WEIGHTS, framework="pt") as stored:
            count = len(stored.keys())
        report = model.load_adapter(str(adapter.folder), adapter_name=None if name is None else key_of(name))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        is_shape = "mismatched_sizes" in str(error)
        reason = "its weights have other shapes" if is_shape else first_line(error)
        rule = f"must be an adapter for {adapter.base}: {reason}"
        raise CheckpointError("model", str(adapter.folder), rule) from error
    except SafetensorError as error:
        rule = "must be a complete safetensors file"
        raise CheckpointError("model", str(adapter.folder / WEIGHTS), rule) from error
    problems = {  # weights of adapters that were loaded before are not in the file
        title: sorted({str(key) for key in getattr(report, name, ())} - before)
        for title, name in (
            ("missing keys", "missing_keys"),
            ("unknown keys", "unexpected_keys"),
            ("wrong shapes", "mismatched_keys"),
        )
    }
    own = [(name, weight) for name, weight in stored_weights(model) if name not in before]
    problems["NaN or infinity in"] = [name for name, weight in own if not is_finite(weight)]
    found = [f"{title}: {listing(names)}" for title, names in problems.items() if names]
    if found or not count:
        reason = "; ".join(found) or "this one holds no weights"
        rule = f"must be an adapter for {adapter.base}: {reason}"
        raise CheckpointError("model", str(adapter.folder), rule)
    model.eval()


def load_lora(model: PreTrainedModel, name: str, source: str) -> None:
    """Load one of several LoRA adapters, between which `use_adapter` chooses.

    Args:
        model: the base model.
        name: name of the adapter.
        source: folder or hub id of the adapter. The base model that it names is not read.

    Raises:
        CheckpointError: there is no adapter, or it is damaged, or does not fit the model.
        InputError: the name cannot be used.
        MissingDependencyError: peft is not installed.
        UnsupportedModelError: the adapter changes more than LoRA layers.
    """
    if not NAME.fullmatch(name):
        raise InputError("--lora", name, f"must have a name that matches {NAME.pattern}")
    path, weights = locate(source, CONFIG, {}), locate(source, WEIGHTS, {})
    if path is None or weights is None:
        rule = f"must be a folder or hub id of an adapter with {CONFIG} and {WEIGHTS}"
        raise CheckpointError("--lora", source, rule)
    if not is_peft_available():
        raise MissingDependencyError("--lora needs peft: pip install peft")
    table = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(table, dict) or table.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{source} must be a LoRA adapter to be loaded beside others")
    for field in BEYOND_LORA:  # peft cannot switch these parts for each request
        if table.get(field) not in (None, [], {}, False, "none"):
            rule = f"its {field} must be unset, because other adapters share the model"
            raise UnsupportedModelError(f"{source} cannot be loaded beside others: {rule}")
    load_adapter(model, Adapter(path.parent, str(model.name_or_path), None), name)


def use_adapter(model: PreTrainedModel, name: str | None) -> None:
    """Let one of the adapters of `load_lora` act from now on, or with None the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # optional; `load_lora` has checked it

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            if name is not None:
                module.set_adapter([key_of(name)])
            module.enable_adapters(enabled=name is not None)


def key_of(name: str) -> str:
    """The key of an adapter in peft: without dots, and part of no other weight's name."""
    return "mmspec:" + name.replace(".", "%2E")


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Save a model into a folder; of a model with adapters only the adapters are saved, as in transformers.

    Raises:
        MissingDependencyError: the model has adapters, and transformers needs a newer peft to save them.
    """
    try:
        model.save_pretrained(folder)
    except ValueError as error:
        if getattr(model, "_hf_peft_config_loaded", False) and "PEFT" in str(error):
            remedy = "pip install -U peft, or merge the adapter into its base (merge_and_unload of peft)"
            raise MissingDependencyError(f"{first_line(error)}: {remedy}") from error
        raise
