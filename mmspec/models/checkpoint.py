"""Loading of checkpoints: check the files, load them with transformers, then check the weights.

Damaged or hostile folders raise an error before anything is allocated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSpeechSeq2Seq,
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
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.import_utils import is_gguf_available

from mmspec.errors import CheckpointError, MissingDependencyError, UnsupportedModelError
from mmspec.models.local_paths import advice, is_path, nearest
from mmspec.models.weights import is_finite, stored_weights
from mmspec.open_types import Json, Processor
from mmspec.plugins import FAMILIES, load, register_families

#: A class of transformers or diffusers with `from_pretrained`, and the model that it returns.
ModelClass: TypeAlias = Any
AnyModel: TypeAlias = Any

SUFFIX, MAGIC = ".gguf", b"GGUF"

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1_000_000
MAX_INDEX_BYTES = 100_000_000
MAX_DIMENSION = 10_000_000
MAX_LAYERS = 10_000


def split_gguf(source: object) -> tuple[object, dict[str, str]]:
    """Split the path of a GGUF file into its folder and transformers' keyword `gguf_file`; keep others."""
    if not isinstance(source, str | Path) or not str(source).endswith(SUFFIX) or Path(source).is_dir():
        return source, {}
    path = Path(source)
    if len(path.parts) == 2 and not path.parent.is_dir():  # a repository would have two names before the file
        rule = f"is a GGUF file that does not exist; {advice(str(path.parent))}"
        raise CheckpointError("model", str(source), rule)
    return str(path.parent), {"gguf_file": path.name}


def check_gguf(folder: Path, name: str) -> None:
    """Raise unless a GGUF file of a folder or hub repository can be read."""
    path = folder / name
    if folder.is_dir() and not path.is_file():
        others = ", ".join(sorted(one.name for one in folder.glob(f"*{SUFFIX}"))) or "none"
        raise CheckpointError("gguf_file", name, f"must be a file in {folder}; GGUF files there: {others}")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError("gguf_file", str(path), "must be a GGUF file, which begins with 'GGUF'")
    if not is_gguf_available():
        raise MissingDependencyError(f"{path.name} needs the package gguf: pip install gguf")


def check_source(source: object, argument: str = "model") -> str:
    """Return the name of a local folder or hub id, as a string.

    A model that was saved without a part is completed (`Family.complete`), and the completed folder returned.

    Raises:
        CheckpointError: the source is not a valid name, or is a folder that does not exist.
        MissingDependencyError: the package that has the missing part is not installed.
    """
    rule = "must be a folder with a checkpoint, or a hub id such as 'llava-hf/llava-1.5-7b-hf'"
    if not isinstance(source, str | Path) or not str(source) or "\0" in str(source):
        raise CheckpointError(argument, source, rule)
    name, folder = str(source), Path(source)
    try:
        if folder.is_dir():
            for family in FAMILIES.values():
                folder = folder if family.complete is None else load(family.complete)(folder)
            return name if folder == Path(source) else str(folder)
        if not folder.exists():
            # a name that differs from a folder's in capitals alone is a slip, not a hub id
            same = "/" not in name and any(one.name.lower() == name.lower() for one in Path().iterdir())
            if not same and not is_path(name):
                return name
            rule = f"must be a folder with a checkpoint; {advice(name)}"
    except OSError as error:
        raise CheckpointError(argument, name, f"{rule} ({error.strerror})") from error
    raise CheckpointError(argument, name, rule)


def load_config(
    source: str, *, argument: str = "model", pickles: bool = False, variant: str | None = None, **where: Any
) -> PreTrainedConfig:
    """Load the config of a local folder or hub id, or of a GGUF file in it.

    Args:
        source: a local folder or hub id.
        argument: name of the argument in error messages.
        pickles: whether the weights are pickles of tensors.
        variant: variant of the weights, which is part of their file names.
        where: passed on to transformers.

    Raises:
        CheckpointError: the config is missing, not JSON, has impossible sizes, or needs code that is not
            allowed.
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
    except Exception as error:  # a config can raise anything inside transformers
        raise CheckpointError(argument, source, f"has no usable config: {first_line(error)}") from error


def next_step(error: OSError, folder: Path) -> str:
    """The rule and remedy for a folder or hub id that cannot be loaded, for `CheckpointError`."""
    if folder.is_dir():
        return f"cannot be loaded: {first_line(error)}"
    near = nearest(str(folder))
    hint = "" if near is None else f"did you mean {str(near)!r}? "
    if is_offline_mode():
        return f"is neither a local folder nor in the hub's cache; {hint}unset HF_HUB_OFFLINE to download it"
    rule = f"is not a local folder, and the hub does not have it; {hint}check the name and the network"
    return f"{rule} ({first_line(error)})"


def check_folder(
    folder: Path, argument: str, *, trust_remote_code: bool, weights: str = "*.safetensors"
) -> None:
    """Raise CheckpointError for a folder that must not, or cannot, be loaded.

    Args:
        folder: folder of a checkpoint.
        argument: name of the argument in error messages.
        trust_remote_code: whether code from the folder may run.
        weights: pattern of the files that hold its weights.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(argument, str(folder), "must be a folder with a config.json")
    ours = {kind for family in FAMILIES.values() if family.own_code for kind in family.types}
    for file in sorted(folder.glob("*config.json")):
        table = read_json(file, MAX_CONFIG_BYTES) if file.is_file() else None
        own = isinstance(table, dict) and table.get("model_type") in ours
        if has_key(table, "auto_map") and not trust_remote_code and not own:
            rule = "needs code from the checkpoint; pass trust_remote_code=True if you trust it"
            raise CheckpointError(str(file), "auto_map", rule)
    config = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(config, dict) or "model_type" not in config:
        raise CheckpointError(str(path), config, "must be a JSON object with the key 'model_type'")
    kind = config["model_type"]
    if not trust_remote_code and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
        rule = f"must be a model type of transformers {transformers_version}"
        raise CheckpointError(f"{path}: model_type", kind, rule + nearest_name(kind, CONFIG_MAPPING))
    check_sizes(config, str(path))
    for index in folder.glob("*.safetensors.index.json"):
        for shard in read_index(index).values():
            if not (folder / shard).is_file():
                raise CheckpointError(str(index), shard, "names a file that is missing from its folder")
    if not any(folder.glob(weights)):
        rule = f"must be a folder with weights in files like {weights}"
        if weights == "*.safetensors":
            rule = "must be a folder with safetensors weights; convert others with save_pretrained"
            if any(folder.glob("*.bin")):
                rule += ", or pass use_safetensors=False for pickles of tensors alone"
        raise CheckpointError(argument, str(folder), rule)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            rule = f"must be a complete safetensors file ({first_line(error)})"
            raise CheckpointError(argument, str(file), rule) from error


def nearest_name(name: object, known: Iterable[str]) -> str:
    """A hint for error messages with the known name that is nearest; empty if none is near."""
    near = get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file of limited size."""
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(str(path), f"{size} bytes", f"must have at most {max_bytes} bytes")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        rule = f"must be valid JSON ({first_line(error)})"
        raise CheckpointError(str(path), f"{size:,} bytes", rule) from error


def read_index(index: Path) -> dict[str, str]:
    """Read an index of shards: the file of each tensor, in the folder of the index.

    Raises:
        CheckpointError: the file is too large, or is not an index.
    """
    stored = read_json(index, MAX_INDEX_BYTES)
    table = stored.get("weight_map") if isinstance(stored, dict) else None
    if not isinstance(table, dict) or not table:
        rule = "must be a JSON object whose 'weight_map' names the file of each tensor"
        raise CheckpointError(str(index), stored, rule)
    for shard in table.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(str(index), shard, "must name files in the same folder")
    return table


def has_key(table: object, name: str) -> bool:
    """True if a JSON value has a key of that name at any depth."""
    if isinstance(table, dict):
        return name in table or any(has_key(value, name) for value in table.values())
    return isinstance(table, list) and any(has_key(value, name) for value in table)


def check_sizes(config: Json, path: str) -> None:
    """Raise CheckpointError for impossible sizes, before anything is allocated."""
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
                raise CheckpointError(f"{path}: {key}", value, f"must be between 0 and {limit}")


def load_model(
    source: str,
    config: PreTrainedConfig,
    *,
    argument: str = "model",
    surplus_allowed: bool = True,
    model_class: ModelClass = None,
    **where: object,
) -> PreTrainedModel:
    """Load a model in eval mode; every weight must be present and finite.

    Args:
        source: a local folder or hub id.
        config: its config.
        argument: name of the argument in error messages.
        surplus_allowed: False to refuse weights that the model does not use; True to log them.
        model_class: class of a model that the auto classes of transformers lack.
        where: passed on to transformers.

    Raises:
        UnsupportedModelError: neither a multimodal nor a causal language model.
        CheckpointError: weights are missing, have wrong shapes, or are not finite; the message names the
            first three.
    """
    auto: ModelClass
    if model_class is not None:
        auto = model_class
    elif type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = AutoModelForImageTextToText
    elif type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        auto = AutoModelForMultimodalLM
    elif type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
        auto = AutoModelForSpeechSeq2Seq
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = AutoModelForCausalLM
    else:
        known = sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is neither a multimodal nor a causal language model. "
            "See AutoModelForMultimodalLM for the supported families"
            f"{nearest_name(config.model_type, known)}"
        )
    try:
        model, report = load_reported(auto, source, config=config, **where)
    except Exception as error:
        if "Float8" in str(error):
            rule = "has float8 weights, in which no model computes; pass dtype=torch.bfloat16"
            raise CheckpointError(argument, source, rule) from error
        if "`offload_folder`" in str(error):
            rule = "has weights that must be rewritten to stay on the disk; pass offload_folder=... as well"
            raise CheckpointError(argument, source, rule) from error
        raise CheckpointError(argument, source, f"cannot be loaded: {first_line(error)}") from error
    check_weights(model, report, source, argument, surplus_allowed=surplus_allowed)
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_reported(model_class: ModelClass, source: str, **where: object) -> tuple[AnyModel, Json]:
    """Load a model of transformers or diffusers with its loading report, for `check_weights`."""
    # the report has the names of weights with wrong shapes; an error of transformers would not
    how = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True, **where}
    with torch.random.fork_rng(devices=[]):  # such weights, and missing ones, are drawn at random
        loaded: tuple[AnyModel, Json] = model_class.from_pretrained(source, **how)
    return loaded


def load_checked(
    model_class: ModelClass, source: str, argument: str, what: str = "", **where: object
) -> AnyModel:
    """Load a model of transformers or diffusers in eval mode; weights must be present, used and finite.

    Args:
        model_class: class with `from_pretrained`, which gets `source` and `where`.
        source: a local folder or hub id.
        argument: name of the argument in error messages.
        what: kind of model, for error messages.

    Raises:
        CheckpointError: there is none, or weights are missing, unused, have wrong shapes, or are not finite.
    """
    try:
        model, report = load_reported(model_class, source, **where)
    except Exception as error:  # a config can raise anything inside these libraries
        rule = f"has no usable {what}" if what else "cannot be loaded"
        raise CheckpointError(argument, source, f"{rule}: {first_line(error)}") from error
    check_weights(model, report, source, argument)
    return model.eval()


def check_weights(
    model: torch.nn.Module, report: Json, source: str, argument: str, *, surplus_allowed: bool = False
) -> None:
    """Raise CheckpointError unless every weight was in the files, has its shape, and is finite."""
    problems = {
        "missing keys": sorted(report.get("missing_keys", ())),
        "unknown keys": sorted(report.get("unexpected_keys", ())),
        "wrong shapes": sorted(name for name, *_ in report.get("mismatched_keys", ())),
    }
    if surplus_allowed and (names := problems.pop("unknown keys")):
        logger.warning("%s holds weights that its model does not use: %s", source, listing(names))
    if found := [f"{title}: {listing(names)}" for title, names in problems.items() if names]:
        raise CheckpointError(argument, source, f"does not match its config: {'; '.join(found)}")
    broken = [name for name, weight in stored_weights(model) if not is_finite(weight)]
    if broken:
        raise CheckpointError(argument, source, f"has weights with NaN or infinity: {listing(broken)}")


def load_processor(
    source: str,
    config: PreTrainedConfig,
    *,
    argument: str = "model",
    words_only: bool = False,
    **where: object,
) -> Processor:
    """Load the processor of a multimodal model, or the tokenizer of others and with `words_only`."""
    kinds = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )
    is_multimodal = any(type(config) in kind for kind in kinds)
    auto = AutoProcessor if is_multimodal and not words_only else AutoTokenizer
    try:
        return with_own_tokenizer(auto.from_pretrained(source, **where), source, **where)
    except Exception as error:  # its files can raise anything too
        raise CheckpointError(argument, source, f"has no usable processor: {first_line(error)}") from error


def with_own_tokenizer(processor: Processor, source: str, **where: Any) -> Processor:
    """Return the processor or tokenizer with the tokenizer class that its folder names.

    For some model types (Qwen3.5) transformers always uses the class of the model type, and reads only the
    vocabulary of the folder. A folder that names `TokenizersBackend` is loaded from its tokenizer.json, as
    it was saved.
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
    """Raise CheckpointError if the tokenizer has ordinary tokens without an embedding in the model."""
    added = tokenizer.get_added_vocab()
    largest = max((index for token, index in tokenizer.get_vocab().items() if token not in added), default=-1)
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    if largest >= rows:
        rule = f"must be made for this model, whose vocabulary has {rows} tokens"
        raise CheckpointError("tokenizer", f"token ids up to {largest}", rule)


def tokenizer_of(processor: Processor) -> Processor:
    """Return the tokenizer of a processor, or the tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, source: str
) -> None:
    """Raise CheckpointError unless both tokenizers have the same id for every token.

    Added special tokens may differ: no draft needs them.
    """
    theirs, added = draft.get_vocab(), target.get_added_vocab()
    ordinary = {token: index for token, index in target.get_vocab().items() if token not in added}
    shared = sum(1 for token, index in ordinary.items() if theirs.get(token) == index)
    if shared < len(ordinary):
        raise CheckpointError(
            "drafter",
            source,
            f"must use the target's tokenizer; {shared / len(ordinary):.0%} of the target's {len(ordinary)} "
            "tokens have the same id in both",
        )


def bytes_of(model: torch.nn.Module) -> int:
    """Bytes of a model's weights."""
    return sum(weight.nbytes for weight in model.parameters())


def listing(names: list[str]) -> str:
    """The first three names, and the number of others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def first_line(error: Exception) -> str:
    """The first line of an exception's text, shortened; for an invalid config, the rule that it breaks."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        return str(error.__cause__)[:200]  # the text itself begins with the name of the validator
    if isinstance(error, KeyError):
        return f"there is no key {error}"
    text = str(error).strip().splitlines()
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return (kind + text[0].rstrip(": ") if text else type(error).__name__)[:200]
