"""Loading of a frozen target and of the training data of its drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from mmspec.errors import CheckpointError, InputError
from mmspec.families.image_parts import ModelSource
from mmspec.families.images import image_target
from mmspec.models.checkpoint import check_source, check_vocabulary, load_config, load_model, load_processor
from mmspec.open_types import Keywords
from mmspec.plugins import Family, family_of, load
from mmspec.registry import require_known
from mmspec.targets import CausalTarget, VisionLanguageTarget, adapt
from mmspec.text_file import read_text
from mmspec.training.data.audio import TRIAL_ROWS as AUDIO_TRIAL
from mmspec.training.data.audio import AudioRows, hears, read_clips
from mmspec.training.data.conversation_file import read_conversations
from mmspec.training.data.conversations import (
    TRIAL_ROWS,
    ConversationReader,
    ConversationRows,
    check_written,
)
from mmspec.training.data.images import TRIAL_IMAGES, ImageFile, open_llamagen
from mmspec.training.data.rows import check_count
from mmspec.training.data.scenes import scene_data
from mmspec.training.data.sequences import DrafterData

__all__ = ["MakeData", "Rows", "open_target", "pick_dtype"]

Rows = str | Path | Iterable[Mapping[str, object]]
MakeData = Callable[[Any, Any, int, int, int], DrafterData]
"""Function: (target, reader, batch size, seed, regenerate) -> data.

The reader is a `ConversationReader`, the folder of a LlamaGen, or the tokenizer or processor of another
image model.
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_target(
    source: str | Path,
    device: torch.device,
    batch_size: int,
    seed: int,
    data: Rows | MakeData,
    *,
    dtype: str = "auto",
    max_length: int | None = None,
    regenerate: int = 0,
    learn_prompts: bool = False,
    image_method: str | None = None,
    states: str | Path | None = None,
) -> tuple[CausalTarget, DrafterData]:
    """Load a frozen target from a folder or hub id, and its data. Data are checked before weights are read.

    The arguments are those of `train_drafter`; `image_method` is the method if it is for image tokens only.

    Raises:
        CheckpointError: the target cannot be read, or its family has no known training data.
        InputError: the data cannot be used, or the target does not support an argument.
    """
    exact = pick_dtype(dtype, device)
    name = check_source(source, "target")
    config = load_config(name, argument="target")
    family = family_of(config)
    draws = family is not None and family.draws == "tokens" and not family.answers  # like LlamaGen
    if states and (callable(data) or image_method is not None or draws):
        raise InputError("states", str(states), "cannot be used with data that change in every step")
    if learn_prompts and callable(data):
        raise InputError("learn_prompts", True, "must be False for data that change in every step")
    if draws:
        for argument, value in (
            ("max_length", max_length),
            ("regenerate", regenerate),
            ("learn_prompts", learn_prompts),
        ):
            if value:
                raise InputError(argument, value, "cannot be used: the target draws images")
        if dtype not in ("auto", "float32"):
            raise InputError("dtype", dtype, "must be float32: the target draws images")
        if not callable(data) and not isinstance(data, str | Path):
            raise InputError("data", type(data).__name__, "must be a JSONL file: the target draws images")
        folder = Path(name)
        if callable(data):
            images = open_llamagen(folder, device)
            return images, data(images, folder, batch_size, seed, regenerate)
        lines = read_text(Path(data), "data", "must be a JSONL file").split("\n")
        check_count([line for line in lines if line.strip()], TRIAL_IMAGES)
        images = open_llamagen(folder, device)
        return images, ImageFile(images, folder, batch_size, seed, Path(data))
    if image_method is not None:
        if family is None or (family.draws != "tokens" and family.prompts is None):
            rule = "must be a method for text: this one learns from images that the target draws"
            raise InputError("method", image_method, rule)
        if not callable(data):
            rule = "must be a function, such as `ImagePrompts(file)` of mmspec.pipelines.drafter_prompts"
            raise InputError("data", type(data).__name__, rule)
        target, words = open_image_tokens(name, config, family, dtype=exact, device_map={"": device})
        return target, data(target, words, batch_size, seed, regenerate)
    if hears(config):
        return open_speech(name, config, exact, device, batch_size, seed, data, max_length=max_length,
                           regenerate=regenerate, learn_prompts=learn_prompts)  # fmt: skip
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not (sees or is_language_model(config)):
        raise CheckpointError(
            "target",
            config.model_type,
            "must be a vision-language, causal language or speech model, or a LlamaGen that `mmspec convert` "
            "wrote",
        )
    if data is scene_data and not sees:
        rule = f"must be a file of conversations: scenes have images, and {config.model_type!r} is text-only"
        raise InputError("data", "none", rule)
    processor = load_processor(name, config, argument="target")
    if getattr(processor, "chat_template", None) is None:
        rule = f"must have a {'processor' if sees else 'tokenizer'} with a chat template"
        raise CheckpointError("target", name, rule)
    told = []
    if not callable(data):
        controls = (getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio"))
        known = [token for token in controls if isinstance(token, str)]
        told = read_conversations(data, known, with_images=sees)
        check_count(told, TRIAL_ROWS)
        check_written(told, processor)
    if callable(data) and max_length is not None:
        raise InputError("max_length", max_length, "cannot be used with generated data")
    model = load_model(name, config, argument="target", dtype=exact, device_map={"": device})
    nn.Module.requires_grad_(model, False)
    target = VisionLanguageTarget(model) if sees else adapt(model)
    reader = ConversationReader(target, processor)
    check_vocabulary(reader.tokenizer, model)
    if callable(data):
        return target, data(target, reader, batch_size, seed, regenerate)
    how: Keywords = {"max_length": max_length, "regenerate": regenerate, "learn_prompts": learn_prompts}
    return target, ConversationRows(reader, told, batch_size, seed, **how)


def open_speech(
    source: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch_size: int,
    seed: int,
    data: Rows | MakeData,
    *,
    max_length: int | None,
    regenerate: int,
    learn_prompts: bool,
) -> tuple[CausalTarget, AudioRows]:
    """Load a frozen speech encoder-decoder, and its clips of audio.

    Raises:
        CheckpointError: the model cannot be read.
        InputError: the data or an argument cannot be used.
    """
    for argument, value in (("max_length", max_length), ("learn_prompts", learn_prompts)):
        if value:
            raise InputError(argument, value, "cannot be used: the target transcribes audio")
    if callable(data):
        rule = 'must be JSONL with "audio" and "text": the target transcribes audio'
        raise InputError("data", "none", rule)
    clips = read_clips(data, with_text=not regenerate)
    check_count(clips, AUDIO_TRIAL)
    processor = load_processor(source, config, argument="target")
    model = load_model(source, config, argument="target", dtype=dtype, device_map={"": device})
    nn.Module.requires_grad_(model, False)
    target = adapt(model)
    return target, AudioRows(target, processor, clips, batch_size, seed, regenerate)


def is_language_model(config: PreTrainedConfig) -> bool:
    """Whether a config belongs to a text-only autoregressive model."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and family_of(config) is None


def open_image_tokens(
    source: str, config: PreTrainedConfig, family: Family, **how: Any
) -> tuple[CausalTarget, Any]:
    """Load a frozen model that draws image tokens, and its tokenizer or processor.

    Raises:
        CheckpointError: the model cannot be read.
    """
    if family.load is not None and not family.draws:  # a loader for models that do not draw by themselves
        loaded = load(family.load)(ModelSource(source, config, how=how))
        model, words = loaded["model"], loaded["processor"]
    else:
        words = load_processor(source, config, argument="target", words_only=True)
        model = load_model(source, config, argument="target", **how)
    nn.Module.requires_grad_(model, False)
    return image_target(model) or adapt(model), words


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a frozen target; "auto" is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        InputError: the name is unknown.
    """
    require_known("dtype", name, ("auto", *DTYPES))
    return DTYPES["bfloat16" if device.type == "cuda" else "float32"] if name == "auto" else DTYPES[name]
