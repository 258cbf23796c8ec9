"""Training of scenes-smol: a vision tower and a projector in front of a frozen SmolLM2.

The training has three parts:

1. The projector learns visual tokens that are sums of word embeddings. This needs no language model.
2. The model learns texts about single images, pairs and clips: captions and answers.
3. Given replies of SmolLM2 to descriptions of images in words, the model learns to give the same replies to
   the images alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mmspec.assets import reference_models
from mmspec.errors import CheckpointError, InputError
from mmspec.families.smollm2 import language_model as smollm2
from mmspec.scenes import training_seeds
from mmspec.training.record import taken_over
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals
from reference.smol_data import SHARES, SpokenBatch, spoken_batch
from reference.smol_model import SpeechLoss, WordsLoss, build_smol, build_smol_processor, save_smol
from reference.smol_replies import Replies
from reference.trainer import finish, held_out_figures
from reference.vlm_data import PatchBatch, patch_batch

__all__ = ["train_smol"]

WORDS_SEEDS, SPEECH_SEEDS = 40, 41  # keys of the seeds: no other training draws the same scenes
WORDS, SPEECH = 0, 1
WORDS_SHARE = 0.25
WORDS_ROWS = 4  # times the batch size: these rows are far cheaper
TOWER_FACTOR = 0.3  # of the learning rates: the tower is trained already; with replies, all parts are
CHECK_ROWS = 24
VISUAL_TOKENS = 16  # of an image: 96 pixels a side, patches of 12 pixels, merged two by two
DEFAULT_MINUTES = 240.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@flush_subnormals()
def train_smol(
    out: str | Path,
    *,
    replies: str | Path | None = None,
    start: str | Path | None = None,
    tower_from: str | Path | None = None,
    rank: int = 0,
    dtype: str = "float32",
    **how: Unpack[RunOptions],
) -> Path:
    """Train scenes-smol, and save all parts except the language model.

    Runs on a CPU, or on one or several GPUs through `accelerate launch`.

    Args:
        out: the folder to write. It contains no language model.
        replies: JSONL file of `python -m reference replies`. Every other step then learns from half a batch
            of its rows, and all learning rates are multiplied by 0.3.
        start: a folder that this function wrote, to start from.
        tower_from: a trained LLaVA whose tower is copied if there is no `start`; None for scenes-llava in
            assets/.
        rank: rank of a LoRA of the language model; 0 for none.
        dtype: dtype of the language model during training, "float32" or "bfloat16". The latter takes half the
            time on GPUs and on CPUs with AMX, and many times as long on other CPUs.
        how: see `RunOptions`; by default 240 minutes, with 16 rows per step and process.

    Returns:
        The folder. `complete` of `mmspec.families.smollm2.language_model` adds the language model when the
        folder is loaded.

    Raises:
        InputError: `dtype`, `rank`, `replies` or `tower_from` is invalid.
        CheckpointError: `start`, `tower_from` or the state to resume from cannot be read or does not fit.
        MissingDependencyError: the package of the language model is not installed.
    """
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, "must be " + " or ".join(DTYPES))
    if rank < 0:
        raise InputError("rank", rank, "must be at least 0")
    out = Path(out)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16, check_s=1200.0)
    language, tokenizer = smollm2.read_language_model()
    tower = read_tower(tower_from) if start is None else tower_of(start)
    model = build_smol(language, tokenizer, tower)
    processor = build_smol_processor(tokenizer, model.config)
    said = None if replies is None else Replies.read(Path(replies), processor.tokenizer, VISUAL_TOKENS)
    words = WordsLoss(model, processor.tokenizer)
    speech = SpeechLoss(model, rank, training.accelerator.device, DTYPES[dtype])
    before = taken_over(
        start, "a folder of the same rank that `reference train smol` wrote", speech.take_over
    )
    if training.stage == WORDS:
        if start is None:
            training.train(words_stage(training, words), WORDS_SHARE)
        training.stage = SPEECH
    share = 1 - WORDS_SHARE if start is None else 1.0
    training.train(speech_stage(training, speech, processor.tokenizer, said), share)

    def save(record: dict[str, Any]) -> None:
        save_smol(model, speech.adapters, processor, out, record)

    options = {
        **training.length,
        "from": start,
        "replies": replies,
        "tower-from": tower_from,
        "rank": rank or None,
        "dtype": dtype,
    }
    how_made: dict[str, Any] = {"model": speech, "before": before, "size": "smol"}
    return finish(training, out, save, command="smol", options=options, **how_made)


def words_stage(training: Training, learner: WordsLoss) -> Stage:
    """Make the stage in which the projector learns visual tokens that are sums of word embeddings."""
    patch = learner.vision_tower.config.patch_size

    def make(step: int) -> PatchBatch:
        process, count = training.accelerator.process_index, WORDS_ROWS * training.batch_size
        return patch_batch(training_seeds(training.seed, WORDS_SEEDS, step, process, count), patch)

    check = held_out_figures(patch_batch(np.arange(CHECK_ROWS), patch), training.accelerator.device)
    return Stage("words", learner, make, check, slow="vision_tower", slow_factor=TOWER_FACTOR)


def speech_stage(
    training: Training, learner: SpeechLoss, tokenizer: PreTrainedTokenizerBase, replies: Replies | None
) -> Stage:
    """Make the stage that learns sentences; if there are replies, every other step learns from them."""
    accelerator = training.accelerator
    held_out = {kind: spoken_batch(np.arange(CHECK_ROWS), kind, tokenizer, VISUAL_TOKENS) for kind in SHARES}

    def make(step: int) -> SpokenBatch:
        process, count = accelerator.process_index, training.batch_size
        if replies is not None and step % 2:
            return replies.batch(training.seed, step, process, max(1, count // 2))
        seeds = training_seeds(training.seed, SPEECH_SEEDS, step, process, count)
        kind = np.random.default_rng(seeds).choice(list(SHARES), p=list(SHARES.values()))
        return spoken_batch(seeds, str(kind), tokenizer, VISUAL_TOKENS)

    def check(module: nn.Module) -> dict[str, float]:
        figures = {}
        for kind, batch in held_out.items():
            _, exact = module(batch.to(accelerator.device))
            figures[kind] = round(float(exact.float().mean()), 3)
        if replies is not None:
            losses = [module(batch.to(accelerator.device))[0] for batch in replies.held_out()]
            figures["divergence"] = round(float(torch.stack(losses).mean()), 3)
        return figures

    slow = "vision_tower" if replies is None else ""  # the empty text is part of every name
    return Stage("speech", learner, make, check, slow=slow, slow_factor=TOWER_FACTOR)


def read_tower(folder: str | Path | None) -> PreTrainedModel:
    """Load the vision tower of a trained LLaVA, by default that of scenes-llava in assets/.

    Raises:
        InputError: `folder` is None and scenes-llava is not beside the package.
        CheckpointError: the folder does not contain a trained LLaVA.
    """
    source = Path(folder) if folder is not None else reference_models().get("scenes-llava")
    if source is None:
        raise InputError(
            "tower_from", None, "must be a trained LLaVA, because scenes-llava is not beside the package"
        )
    try:
        donor: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
        tower: PreTrainedModel = donor.model.vision_tower
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError("tower_from", str(source), "must be a folder with a trained LLaVA") from error
    return tower


def tower_of(start: str | Path) -> PreTrainedModel:
    """Build a vision tower of the shape of a trained model's, with random weights.

    Raises:
        CheckpointError: the folder has no config of such a model.
    """
    try:
        tower: PreTrainedModel = AutoModel.from_config(AutoConfig.from_pretrained(start).vision_config)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "start", str(start), "must be a folder that `reference train smol` wrote"
        ) from error
    return tower
