"""Training of scenes-smol: a projector that speaks to SmolLM2, which stays as it is, of images.

Three stages. Visual tokens first learn to be sums of the embeddings of words, which needs no language model.
Then captions, answers, pairs and clips are learnt from their texts. At last, given replies that the language
model wrote to prompts about images told in words, it learns to say the same of the images alone.
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

WORDS_SEEDS, SPEECH_SEEDS = 40, 41  # of seeds: no other training draws the same scenes
WORDS, SPEECH = 0, 1
WORDS_SHARE = 0.25
WORDS_ROWS = 4  # times the batch size: they are far cheaper
TOWER_FACTOR = 0.3  # of the rates: the tower has learnt what it needs, and all of it where replies are learnt
CHECK_ROWS = 24
VISUAL_TOKENS = 16  # of an image: 96 pixels a side, 12 a patch, merged two by two
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
    """Train scenes-smol and save what it has beside its language model.

    Runs on whatever `accelerate launch` gives it: a CPU, one GPU or several.

    Args:
        out: the folder to write, which holds no language model.
        replies: JSONL file of `python -m reference replies`; every other step learns from half as many of its
            rows, all at three tenths of the rates, and the rest is as without.
        start: a folder that this function wrote, to begin with.
        tower_from: a trained LLaVA whose tower is taken over where there is no `start`; None is scenes-llava
            in assets/.
        rank: of a LoRA of the language model; 0 leaves it as it is.
        dtype: of the language model while it is learnt from: "float32", or "bfloat16", which takes half the
            time on CPUs with AMX and on GPUs, and many times as long on others.
        how: see `RunOptions`; by default 240 minutes of 16 rows a step and process.

    Returns:
        The folder. `complete` of `mmspec.families.smollm2.language_model` makes it whole; so does everything
        that loads it.

    Raises:
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
        start, "a folder that `reference train smol` wrote, of the same rank", speech.take_over
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
    """The stage in which visual tokens become sums of the embeddings of words."""
    patch = learner.vision_tower.config.patch_size

    def make(step: int) -> PatchBatch:
        process, count = training.accelerator.process_index, WORDS_ROWS * training.batch_size
        return patch_batch(training_seeds(training.seed, WORDS_SEEDS, step, process, count), patch)

    check = held_out_figures(patch_batch(np.arange(CHECK_ROWS), patch), training.accelerator.device)
    return Stage("words", learner, make, check, slow="vision_tower", slow_factor=TOWER_FACTOR)


def speech_stage(
    training: Training, learner: SpeechLoss, tokenizer: PreTrainedTokenizerBase, replies: Replies | None
) -> Stage:
    """The stage of sentences; every other step is of replies, where there are any."""
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

    slow = "vision_tower" if replies is None else ""  # which is in every name
    return Stage("speech", learner, make, check, slow=slow, slow_factor=TOWER_FACTOR)


def read_tower(folder: str | Path | None) -> PreTrainedModel:
    """The vision tower of a trained LLaVA; None is scenes-llava in assets/."""
    source = Path(folder) if folder is not None else reference_models().get("scenes-llava")
    if source is None:
        raise InputError(
            "tower_from", None, "must be a trained LLaVA: scenes-llava is not beside the package"
        )
    try:
        donor: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
        tower: PreTrainedModel = donor.model.vision_tower
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError("tower_from", str(source), "must be a folder with a trained LLaVA") from error
    return tower


def tower_of(start: str | Path) -> PreTrainedModel:
    """A vision tower of the shape of a trained model's, whose weights are read later."""
    try:
        tower: PreTrainedModel = AutoModel.from_config(AutoConfig.from_pretrained(start).vision_config)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "start", str(start), "must be a folder that `reference train smol` wrote"
        ) from error
    return tower
