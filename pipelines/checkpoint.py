"""Opening a checkpoint: look at it first, load it with transformers, check what was loaded.

A damaged or hostile folder is refused before anything is allocated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmspec.errors import CheckpointError, UnsupportedModelError
from mmspec.registry import did_you_mean

MAX_CONFIG_BYTES = 1_000_000
MAX_DIMENSION = 10_000_000
MAX_LAYERS = 10_000


def load_config(source: str, **where: Any) -> PreTrainedConfig:
    """The config of a local folder or hub id.

    Raises:
        CheckpointError: missing, not JSON, of impossible sizes, or in need of code that was not allowed.
    """
    folder = Path(source)
    if folder.is_dir():
        check_folder(folder, trust_remote_code=bool(where.get("trust_remote_code")))
    elif source.startswith(("/", "./", "../", "~")) or folder.exists():
        raise CheckpointError("model", source, "a folder that holds a checkpoint, or a hub id")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, **where)
        return config
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("model", source, first_line(error)) from error


def check_folder(folder: Path, *, trust_remote_code: bool) -> None:
    """Raise CheckpointError for a folder that must not, or cannot, be loaded."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError("model", str(folder), "a folder with a config.json")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(str(path), f"{path.stat().st_size} bytes", f"at most {MAX_CONFIG_BYTES}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(str(path), first_line(error), "valid JSON") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise CheckpointError(str(path), config, "a JSON object with the key 'model_type'")
    if "auto_map" in config and not trust_remote_code:
        raise CheckpointError(
            str(path),
            config["auto_map"],
            "it runs code from the checkpoint: pass trust_remote_code=True if you trust it",
        )
    check_sizes(config, str(path))
    for index in folder.glob("*.safetensors.index.json"):
        for shard in set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()):
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise CheckpointError(str(index), shard, "names of files in the same folder")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CheckpointError(
            "model", str(folder), "safetensors weights; convert others with save_pretrained"
        )
    for file in weights:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(file), first_line(error), "a complete safetensors file") from error


def check_sizes(config: dict[str, Any], path: str) -> None:
    """Raise CheckpointError for sizes that no model has, before anything is allocated."""
    for key, value in config.items():
        if isinstance(value, dict):
            check_sizes(value, path)
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and key.endswith(("_size", "_layers", "_heads", "_dim"))
        ):
            limit = MAX_LAYERS if key.endswith(("_layers", "_heads")) else MAX_DIMENSION
            if not 0 <= value <= limit:
                raise CheckpointError(f"{path}: {key}", value, f"0 to {limit}")


def load_model(source: str, config: PreTrainedConfig, **where: Any) -> PreTrainedModel:
    """The model, in eval mode, every weight present and finite.

    Raises:
        UnsupportedModelError: neither an image-text-to-text nor a causal model.
        CheckpointError: weights are missing, of another shape, or not finite; the first three are named.
    """
    auto: Any
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = AutoModelForImageTextToText
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = AutoModelForCausalLM
    else:
        known = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is neither an image-text-to-text nor a causal language model; "
            f"{did_you_mean(config.model_type, known).split('allowed:')[0]}"
            "see AutoModelForImageTextToText for the families that work"
        )
    model: PreTrainedModel
    try:
        model, report = auto.from_pretrained(
            source, config=config, use_safetensors=True, output_loading_info=True, **where
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError("model", source, first_line(error)) from error
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report[problem])
        if names:
            raise CheckpointError("model", source, f"{problem.replace('_', ' ')}: {listing(names)}")
    broken = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    if broken:
        raise CheckpointError("model", source, f"weights hold NaN or infinity: {listing(broken)}")
    model.eval()
    return model


def load_processor(source: str, config: PreTrainedConfig, **where: Any) -> Any:
    """The processor of a vision-language model, or the tokenizer of a language model."""
    auto = AutoProcessor if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoTokenizer
    try:
        return auto.from_pretrained(source, **where)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("model", source, f"no usable processor: {first_line(error)}") from error


def check_same_tokenizer(target: Any, draft: Any, source: str) -> None:
    """Raise CheckpointError unless both tokenizers give every token the same id.

    Added special tokens may differ; a draft never has to propose them.
    """
    theirs, added = draft.get_vocab(), target.get_added_vocab()
    ordinary = {token: index for token, index in target.get_vocab().items() if token not in added}
    shared = sum(1 for token, index in ordinary.items() if theirs.get(token) == index)
    if shared < len(ordinary):
        raise CheckpointError(
            "drafter",
            source,
            f"a model with the target's tokenizer; {shared / len(ordinary):.0%} of its {len(ordinary)} "
            "tokens have the same id there",
        )


def bytes_of(model: torch.nn.Module) -> int:
    """Bytes held by the weights."""
    return sum(weight.nbytes for weight in model.parameters())


def listing(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def first_line(error: Exception) -> str:
    """The first line of an exception's text, shortened; the whole of it stays in __cause__."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]
