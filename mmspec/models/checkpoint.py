"""Opening a checkpoint: look at it first, load it with transformers, check what was loaded.

A damaged or hostile folder is refused before anything is allocated.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import is_offline_mode
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.import_utils import is_gguf_available

from mmspec.errors import CheckpointError, MissingDependencyError, UnsupportedModelError
from mmspec.models.local_paths import advice, is_path, nearest
from mmspec.models.weights import is_finite, stored_weights
from mmspec.open_types import Json, Processor
from mmspec.plugins import FAMILIES, load, register_families
from mmspec.registry import did_you_mean

#: A class that loads models by `from_pretrained`, of transformers or diffusers; and what it loads.
ModelClass: TypeAlias = Any
AnyModel: TypeAlias = Any

SUFFIX, MAGIC = ".gguf", b"GGUF"

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1_000_000
MAX_INDEX_BYTES = 100_000_000
MAX_DIMENSION = 10_000_000
MAX_LAYERS = 10_000
SHARDS = "names of files in the same folder"


def split_gguf(source: object) -> tuple[object, dict[str, str]]:
    """A path of a GGUF file as the folder and the keyword `gguf_file` of transformers; others as they are."""
    if not isinstance(source, str | Path) or not str(source).endswith(SUFFIX) or Path(source).is_dir():
        return source, {}
    path = Path(source)
    if len(path.parts) == 2 and not path.parent.is_dir():  # a repository would have two names before the file
        raise CheckpointError("model", str(source), f"a file that is there; {advice(str(path.parent))}")
    return str(path.parent), {"gguf_file": path.name}


def check_gguf(folder: Path, name: str) -> None:
    """Raise unless a GGUF file of a folder, or of a hub repository, can be read."""
    path = folder / name
    if folder.is_dir() and not path.is_file():
        others = ", ".join(sorted(one.name for one in folder.glob(f"*{SUFFIX}"))) or "none"
        raise CheckpointError("gguf_file", name, f"a file in {folder}; GGUF files there: {others}")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError("gguf_file", str(path), "a GGUF file, which begins with its name")
    if not is_gguf_available():
        raise MissingDependencyError(f"{path.name} is read by the package gguf: pip install gguf")


def check_source(source: object, argument: str = "model") -> str:
    """The name of a local folder or hub id, as a string.

    Of a model that was saved without a part (`Family.complete`) it is the folder of the whole, which is made.

    Raises:
        CheckpointError: it cannot be a name of either, or is the path of a folder that does not exist.
        MissingDependencyError: the package that has the part is not installed.
    """
    allowed = "a folder that holds a checkpoint, or a hub id such as 'llava-hf/llava-1.5-7b-hf'"
    if not isinstance(source, str | Path) or not str(source) or "\0" in str(source):
        raise CheckpointError(argument, source, allowed)
    name, folder = str(source), Path(source)
    try:
        if folder.is_dir():
            for family in FAMILIES.values():
                folder = folder if family.complete is None else load(family.complete)(folder)
            return name if folder == Path(source) else str(folder)
        if not folder.exists():
            # other capitals than those of a folder are a slip, not the name of a repository
            same = "/" not in name and any(one.name.lower() == name.lower() for one in Path().iterdir())
            if not same and not is_path(name):
                return name
            allowed = f"a folder that holds a checkpoint; {advice(name)}"
    except OSError as error:
        raise CheckpointError(argument, name, f"{allowed} ({error.strerror})") from error
    raise CheckpointError(argument, name, allowed)


def load_config(
    source: str, *, argument: str = "model", pickles: bool = False, variant: str | None = None, **where: Any
) -> PreTrainedConfig:
    """The config of a local folder or hub id, or of a GGUF file in it.

    Args:
        source: a local folder or hub id.
        argument: name of the argument in error messages.
        pickles: whether the weights are pickles of tensors.
        variant: of the weights, which is part of their files' names.
        where: passed through to transformers.

    Raises:
        CheckpointError: missing, not JSON, of impossible sizes, or in need of code that was not allowed.
    """
    folder = Path(source, where.get("subfolder") or "")
    if where.get("gguf_file"):
        check_gguf(folder, where["gguf_file"])
    elif Path(source).is_dir():
        trusted = bool(where.get("trust_remote_code"))
        kind = "bin" if pickles else "safetensors"
        weights = f"*.{kind}" if variant is None else f"*.{variant}*.{kind}"
        check_folder(folder, argument, trust_remote_code=trusted, weights=weights)
    register_families()
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, **where)
        return config
    except OSError as error:
        raise CheckpointError(argument, source, next_step(error, folder)) from error
    except Exception as error:  # a config can make transformers stumble anywhere
        raise CheckpointError(argument, source, f"no usable config: {first_line(error)}") from error


def next_step(error: OSError, folder: Path) -> str:
    """Advice about a hub id that cannot be loaded, for messages."""
    if folder.is_dir():
        return first_line(error)
    near = nearest(str(folder))
    hint = "" if near is None else f"did you mean {str(near)!r}? "
    if is_offline_mode():
        return f"{hint}neither a local folder nor in the hub's cache; unset HF_HUB_OFFLINE to download it"
    allowed = "no local folder, and the hub does not give it; check the name and the network"
    return f"{hint}{allowed} ({first_line(error)})"


def check_folder(
    folder: Path, argument: str, *, trust_remote_code: bool, weights: str = "*.safetensors"
) -> None:
    """Raise CheckpointError for a folder that must not, or cannot, be loaded.

    Args:
        folder: of a checkpoint.
        argument: name of the argument in error messages.
        trust_remote_code: whether it may run code.
        weights: pattern of the files that hold its weights.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(argument, str(folder), "a folder with a config.json")
    ours = {kind for family in FAMILIES.values() if family.own_code for kind in family.types}
    for file in sorted(folder.glob("*config.json")):
        table = read_json(file, MAX_CONFIG_BYTES) if file.is_file() else None
        own = isinstance(table, dict) and table.get("model_type") in ours
        if has_key(table, "auto_map") and not trust_remote_code and not own:
            allowed = "it runs code from the checkpoint: pass trust_remote_code=True if you trust it"
            raise CheckpointError(str(file), "auto_map", allowed)
    config = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(config, dict) or "model_type" not in config:
        raise CheckpointError(str(path), config, "a JSON object with the key 'model_type'")
    kind = config["model_type"]
    if not trust_remote_code and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
        near = did_you_mean(kind, CONFIG_MAPPING).split("allowed:")[0]
        allowed = f"{near}a model type of transformers {transformers_version}"
        raise CheckpointError(f"{path}: model_type", kind, allowed)
    check_sizes(config, str(path))
    for index in folder.glob("*.safetensors.index.json"):
        for shard in read_index(index).values():
            if not (folder / shard).is_file():
                raise CheckpointError(str(index), shard, SHARDS)
    if not any(folder.glob(weights)):
        allowed = f"weights in files like {weights}"
        if weights == "*.safetensors":
            allowed = "safetensors weights; convert others with save_pretrained"
            if any(folder.glob("*.bin")):
                allowed += ", or pass use_safetensors=False for pickles of tensors alone"
        raise CheckpointError(argument, str(folder), allowed)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(file), first_line(error), "a complete safetensors file") from error


def read_json(path: Path, max_bytes: int) -> Any:
    """The content of a JSON file of limited size."""
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(str(path), f"{size} bytes", f"at most {max_bytes}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(str(path), first_line(error), "valid JSON") from error


def read_index(index: Path) -> dict[str, str]:
    """The names of tensors in shards, each with its file, which lies beside the index.

    Raises:
        CheckpointError: it is too large, or says something else.
    """
    stored = read_json(index, MAX_INDEX_BYTES)
    table = stored.get("weight_map") if isinstance(stored, dict) else None
    if not isinstance(table, dict) or not table:
        raise CheckpointError(str(index), stored, "a JSON object with the key 'weight_map'")
    for shard in table.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(str(index), shard, SHARDS)
    return table


def has_key(table: object, name: str) -> bool:
    """True if a key of that name is anywhere in a JSON value."""
    if isinstance(table, dict):
        return name in table or any(has_key(value, name) for value in table.values())
    return isinstance(table, list) and any(has_key(value, name) for value in table)


def check_sizes(config: Json, path: str) -> None:
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


def load_model(
    source: str,
    config: PreTrainedConfig,
    *,
    argument: str = "model",
    surplus_allowed: bool = True,
    model_class: ModelClass = None,
    **where: object,
) -> PreTrainedModel:
    """The model, in eval mode, every weight present and finite.

    Args:
        source: a local folder or hub id.
        config: its config.
        argument: name of the argument in error messages.
        surplus_allowed: False to refuse weights that the model has no use for, which are else logged.
        model_class: where the auto classes of transformers know none.
        where: passed through to transformers.

    Raises:
        UnsupportedModelError: neither an image-text-to-text nor a causal model.
        CheckpointError: weights are missing, of another shape, or not finite; the first three are named.
    """
    auto: ModelClass
    if model_class is not None:
        auto = model_class
    elif type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
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
    try:
        model, report = load_reported(auto, source, config=config, **where)
    except Exception as error:
        if "Float8" in str(error):
            allowed = "dtype=torch.bfloat16: its weights are in float8, in which no model computes"
            raise CheckpointError(argument, source, allowed) from error
        if "`offload_folder`" in str(error):
            allowed = (
                "offload_folder=... as well: some of its weights are written anew to be left on the disk"
            )
            raise CheckpointError(argument, source, allowed) from error
        names = mismatched(auto, source, config) if "mismatched_sizes" in str(error) else []
        what = f"weights of another shape than config.json says: {listing(names)}" if names else ""
        raise CheckpointError(argument, source, what or first_line(error)) from error
    check_weights(model, report, source, argument, surplus_allowed=surplus_allowed)
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_reported(model_class: ModelClass, source: str, **where: object) -> tuple[AnyModel, Json]:
    """A model of transformers or diffusers, and the report of its loading, for `check_weights`."""
    with torch.random.fork_rng(devices=[]):  # weights that are missing would be drawn
        loaded: tuple[AnyModel, Json] = model_class.from_pretrained(
            source, output_loading_info=True, **{"use_safetensors": True, **where}
        )
    return loaded


def load_checked(
    model_class: ModelClass, source: str, argument: str, what: str = "", **where: object
) -> AnyModel:
    """A model of transformers or diffusers in eval mode, every weight present, finite and of use.

    Args:
        model_class, source, where: as of its `from_pretrained`.
        argument: names the source in messages.
        what: is loaded, for the message that none can be.

    Raises:
        CheckpointError: there is none, or weights are missing, surplus, of another shape, or not finite.
    """
    try:
        model, report = load_reported(model_class, source, **where)
    except Exception as error:  # a config can make them stumble anywhere
        reason = f"no usable {what}: {first_line(error)}" if what else first_line(error)
        raise CheckpointError(argument, source, reason) from error
    check_weights(model, report, source, argument)
    return model.eval()


def check_weights(
    model: torch.nn.Module, report: Json, source: str, argument: str, *, surplus_allowed: bool = False
) -> None:
    """Raise CheckpointError unless every weight was in the files, and is finite."""
    problems = {
        title: sorted(map(str, report.get(name, ())))
        for title, name in (("missing keys", "missing_keys"), ("unknown keys", "unexpected_keys"))
    }
    if surplus_allowed and (names := problems.pop("unknown keys")):
        logger.warning("%s holds weights that its model has no use for: %s", source, listing(names))
    if found := [f"{title}: {listing(names)}" for title, names in problems.items() if names]:
        raise CheckpointError(argument, source, "; ".join(found))
    broken = [name for name, weight in stored_weights(model) if not is_finite(weight)]
    if broken:
        raise CheckpointError(argument, source, f"weights hold NaN or infinity: {listing(broken)}")


def mismatched(auto: ModelClass, source: str, config: PreTrainedConfig) -> list[str]:
    """Names of weights in a folder's files whose shapes are not those of the config's model."""
    with torch.device("meta"):
        expected = {
            name: tuple(weight.shape) for name, weight in auto.from_config(config).state_dict().items()
        }
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(source).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            found |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return sorted(name for name in found if found[name] != expected.get(name, found[name]))


def load_processor(
    source: str,
    config: PreTrainedConfig,
    *,
    argument: str = "model",
    words_only: bool = False,
    **where: object,
) -> Processor:
    """The processor of a vision-language model; the tokenizer of others, or where that alone is needed."""
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not words_only
    auto = AutoProcessor if sees else AutoTokenizer
    try:
        return with_own_tokenizer(auto.from_pretrained(source, **where), source, **where)
    except Exception as error:  # the same for the files of a processor
        raise CheckpointError(argument, source, f"no usable processor: {first_line(error)}") from error


def with_own_tokenizer(processor: Processor, source: str, **where: Any) -> Processor:
    """The processor or tokenizer with the tokenizer that its folder names.

    For some model types (Qwen3.5) transformers takes the family's own class whatever the folder says, and of
    the folder's the vocabulary alone. A folder that says `TokenizersBackend` is read as it was saved, from
    its tokenizer.json.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    named = get_tokenizer_config(source, **where).get("tokenizer_class")
    if named != TokenizersBackend.__name__ or type(tokenizer) is TokenizersBackend:
        return processor
    own = TokenizersBackend.from_pretrained(source, **where)
    if tokenizer is processor:
        return own
    processor.tokenizer = own
    return processor


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise CheckpointError if the tokenizer has ordinary tokens that the model has no embedding for."""
    added = tokenizer.get_added_vocab()
    largest = max((index for token, index in tokenizer.get_vocab().items() if token not in added), default=-1)
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    if largest >= rows:
        allowed = f"one made for this model, whose vocabulary has {rows} tokens"
        raise CheckpointError("tokenizer", f"token ids up to {largest}", allowed)


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, source: str
) -> None:
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
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return (kind + text[0] if text else type(error).__name__)[:200]
