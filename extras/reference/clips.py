"""Training and scores of the reference model of clips: next-block prediction (NBP, 2502.07737).

The training begins with a LlamaGen of captions, and does not change its text encoder and image tokenizer. A
caption describes the objects of a clip but not their motion, which the model must choose and continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import T5EncoderModel

from mmspec.cli.loading import parse_choice
from mmspec.errors import InputError
from mmspec.evaluation.quality.attributes import AttributeJudge
from mmspec.scenes import HELD_OUT_SEEDS, IMAGE_TOKENS, caption, sample_scene
from mmspec.scenes.render import animate, render_clip
from mmspec.training.data.images import DROPPED
from mmspec.training.data.scenes import PromptedScenes
from mmspec.training.run import RunOptions, Training, flush_subnormals
from mmspec_extras.families.nbp.modeling import NBPConfig, NBPForCausalLM
from reference.begun import Kept, shape_of, trained_llamagen
from reference.image_data import IMAGE_SIZE, STRIDE, ImageBatch
from reference.image_model import BESIDE_OBJECT, caption_vectors
from reference.image_scores import FIRST_SEED, attribute_scores, load_pipeline
from reference.parallel import beside_decided
from reference.trainer import train_on_scenes
from reference.vlm_data import patch_labels

PROGRAM = "python -m extras.reference"
STAGE = 16  # of the seeds of the scenes
CHECK_CLIPS = 8
DEFAULT_MINUTES = 60.0
DEFAULT_FRAMES = 5


def clip_batch(seeds: np.ndarray, tokenizer: Any, frames: int, *, dropped: float = DROPPED) -> ImageBatch:
    """Return clips of scenes with prompts, as an `ImageBatch` of frames with the places of whole clips.

    `pixels` are [B T, 3, 64, 64], `place_labels` [B, T N, labels of a patch]; `caption_labels` are empty.
    """
    told = PromptedScenes.of(seeds, dropped=dropped)
    clips = [animate(scene, frames) for scene in told.scenes]
    images = np.concatenate([render_clip(clip, IMAGE_SIZE) for clip in clips])
    moved = [[replace(clip.scene, objects=clip.at(frame)) for frame in range(frames)] for clip in clips]
    labels = [np.concatenate([patch_labels(scene, STRIDE, IMAGE_SIZE) for scene in row]) for row in moved]
    words, mask = told.words(tokenizer)
    return ImageBatch(
        pixels=rearrange(torch.from_numpy(images), "n h w c -> n c h w").float() / 127.5 - 1,
        tokens=torch.empty(len(clips), 0, dtype=torch.long),
        words=words,
        word_mask=mask,
        dropped=told.dropped,
        caption_labels=torch.empty(len(clips), 0, dtype=torch.long),
        place_labels=torch.from_numpy(np.stack(labels)),
        class_labels=torch.tensor([scene.class_label for scene in told.scenes]),
    )


def blocks_see(slots: int, size: int, cells: int) -> Tensor:
    """Return the mask [S, S] that gives a clip read at once the visibility of one read block by block.

    Args:
        slots: number S0 of slots of the condition, which has a causal mask, as has the first block without
            its last token.
        size: number n of tokens per block.
        cells: number N of tokens of the clip. S is S0 + N - 1: the last block is not read, and n - 1 special
            tokens follow the first block.
    """
    alone = slots + size - 1
    block = torch.arange(slots + cells - 1)
    block = torch.where(block < alone, block, alone + (block - alone) // size)
    return block[:, None] >= block


@torch.no_grad()
def begin_clips(folder: Path, frames: int) -> NBPForCausalLM:
    """Return a model of clips, with blocks of a row of a frame and the weights of a LlamaGen of captions.

    Raises:
        InputError: the LlamaGen is not conditioned on captions.
    """
    trained = trained_llamagen(folder)
    depth, shape = trained.config.num_hidden_layers, shape_of(trained)
    config = NBPConfig(frames=frames, num_hidden_layers=depth, **shape)
    model = NBPForCausalLM(config)
    model.load_state_dict(trained.state_dict(), strict=False)
    decoder: Any = model.model
    decoder.special_tokens.weight.copy_(
        decoder.embed_tokens.weight.mean(0).expand_as(decoder.special_tokens.weight)
    )
    model.generation_config = trained.generation_config
    model.generation_config.max_new_tokens = config.image_tokens
    return model


class BlockLoss(nn.Module):
    """Cross-entropy of the tokens of clips, each predicted by the token at its place in the block before.

    Cells beside the decided cells of an object have a larger weight, as in `QueryLoss`.

    Args:
        transformer: the model to train.
        text_encoder: encoder of the captions; not trained.
    """

    def __init__(self, transformer: NBPForCausalLM, text_encoder: T5EncoderModel) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder.requires_grad_(False)

    def forward(self, batch: ImageBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: nats per token of first frames, and of the others."""
        config, tokens = self.transformer.config, batch.tokens
        losses = F.cross_entropy(self.read(batch).transpose(1, 2), tokens, reduction="none")
        cell = torch.arange(tokens.shape[1], device=tokens.device)
        when = torch.where(cell < config.group_size, cell, config.group_size - 1 + cell // config.group_size)
        covered = batch.place_labels[..., 0] > 0
        beside = beside_decided(covered, when.expand_as(tokens), config.grid_size)
        weights = 1 + (BESIDE_OBJECT - 1) * beside
        frame = config.grid_size**2
        figures = {"first": losses[:, :frame].mean(), "later": losses[:, frame:].mean()}
        return (losses * weights).sum() / weights.sum(), figures

    def read(self, batch: ImageBatch) -> Tensor:
        """Return logits [B, N, V] of all tokens of clips, in one forward pass."""
        decoder: Any = self.transformer.model
        config, tokens = self.transformer.config, batch.tokens
        size, cells = config.group_size, config.image_tokens
        vectors = caption_vectors(decoder, self.text_encoder, batch)
        slots = vectors.shape[1]
        special = decoder.special_tokens.weight.expand(len(tokens), -1, -1)
        first, rest = decoder.embed_tokens(tokens[:, : cells - size]).split([size, cells - 2 * size], 1)
        place = torch.arange(slots + cells - size, device=tokens.device)
        beyond = config.max_position_embeddings + torch.arange(size - 1, device=tokens.device)
        places = torch.cat([place[: slots + size], beyond, place[slots + size :]])
        sees = blocks_see(slots, size, cells).to(tokens.device)
        heard = F.pad(batch.word_mask.bool(), (0, len(sees) - slots), value=True)
        itself = torch.eye(len(sees), dtype=torch.bool, device=tokens.device)
        states = decoder(
            inputs_embeds=torch.cat([vectors, first, special, rest], 1),
            position_ids=places.expand(len(tokens), -1),
            attention_mask=(sees & heard[:, None] | itself)[:, None],  # padding must see a place
            use_cache=False,
        ).last_hidden_state
        logits: Tensor = self.transformer.lm_head(states[:, slots - 1 :]).float()
        return logits


@flush_subnormals()
def train_clips(
    out: str | Path,
    *,
    start: str | Path,
    frames: int = DEFAULT_FRAMES,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a reference model of clips, and save it as one folder.

    Args:
        out: the folder to write; its matrices are stored in float8.
        start: the trained LlamaGen of captions to begin with; its text encoder, tokenizers and reader are
            kept.
        frames: number of frames of a clip; a block is a row of a frame.
        how: see `RunOptions`; the default is 60 minutes, with 4 clips per step and process.

    Returns:
        The folder. Its `training.json` records the settings of the training.

    Raises:
        InputError: `start` is not a LlamaGen of captions, or `frames` is below 2.
    """
    if frames < 2:
        raise InputError("frames", frames, "must be at least 2")
    out, start = Path(out), Path(start)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=4)
    model = begin_clips(start, frames)
    kept = Kept(start, training.accelerator.device)

    def batch_of(seeds: np.ndarray, **which: Any) -> ImageBatch:
        return kept.with_tokens(clip_batch(seeds, kept.tokenizer, frames, **which))

    train_on_scenes(
        training,
        BlockLoss(model, kept.text_encoder),
        batch_of,
        batch_of(np.arange(CHECK_CLIPS), dropped=0.0),
        title="clips, block by block",
        stage=STAGE,
        outer=("special_tokens",),
    )
    return kept.finish(training, model, out, "clips", {"frames": frames}, program=PROGRAM)


def score_clips(
    folder: str | Path,
    scenes: int = 100,
    seed: int = FIRST_SEED,
    *,
    accelerators: Sequence[str] = ("none",),
    **settings: Any,
) -> dict[str, Any]:
    """Draw clips of held-out captions, and score every frame.

    Args:
        folder: folder that `train_clips` wrote.
        scenes: number of captions, with the seeds `seed`, `seed + 1`, ...
        seed: first seed, within `HELD_OUT_SEEDS`.
        accelerators: names with options, as `mmspec bench` takes them; "none" is plain decoding.
        settings: of all calls of the pipeline.

    Returns:
        For each accelerator, and for `real` clips: `frames`, the share of facts that each frame shows; and,
        for drawn clips, the `forwards` per clip.

    Raises:
        InputError: the scenes are not held-out ones.
        CheckpointError: the folder lacks a part.
    """
    if scenes < 1 or seed not in HELD_OUT_SEEDS or seed + scenes - 1 not in HELD_OUT_SEEDS:
        rule = f"must keep all scenes within the seeds 0 to {HELD_OUT_SEEDS.stop - 1}"
        raise InputError("seed", (seed, scenes), rule)
    pipe, judge = load_pipeline(folder), AttributeJudge.of_model(folder)
    drawn = [sample_scene(seed + index, profile=IMAGE_TOKENS) for index in range(scenes)]
    captions, seeds = [caption(scene) for scene in drawn], [scene.seed for scene in drawn]

    def shares(clips: Tensor) -> list[float]:
        return [attribute_scores(judge, frames, captions).share for frames in clips.unbind(1)]

    real = np.stack([render_clip(animate(scene, pipe.model.config.frames), IMAGE_SIZE) for scene in drawn])
    real_clips = rearrange(torch.from_numpy(real), "n t h w c -> n t c h w").float() / 255
    scores: dict[str, Any] = {"real": {"frames": shares(real_clips)}}
    for name in tqdm(accelerators, desc="accelerators"):
        choice = parse_choice(name)
        pipe.set_accelerator(choice.name, **choice.options)
        clips = pipe(captions, seed=seeds, output_type="pt", **settings)
        scores[name] = {"frames": shares(clips.frames.cpu()), "forwards": clips.stats.nfe_mean}
    return scores
