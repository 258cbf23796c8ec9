"""Training of the reference diffusion model: a LLaVA whose language model also learns to fill masked blocks.

The model starts from a trained LLaVA, whose tower and projector are frozen. It learns three tasks at once, as
other converted models do (SDAR, 2510.06303; Nemotron-Labs-Diffusion, 2607.05722):

1. The next token, with the causal mask. This keeps the model's autoregressive mode.
2. Masked tokens of a block, which attend to their block and to unmasked copies of all earlier blocks.
3. All tokens of a block of masks after a token, for drafts. The tokens before it have the causal mask.

In all tasks the logits of a place predict the next place, so that the first task needs no conversion.

Without blocks, all places attend to each other, including images and prompts (LLaDA, 2502.09992), and the
model learns the second task only. Such a model shows the cost of keeping an image's keys while an answer is
decided.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from mmspec.errors import InputError
from mmspec.families.masked_language.modeling import LLaDAConfig
from mmspec.scenes import training_seeds
from mmspec.scenes.world import CANVAS
from mmspec.training.record import RECORD, save_trained
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals
from reference.trainer import finish, float8_matrices
from reference.vlm_data import ConversationBatch, conversation_batch
from reference.vlm_model import patch_states, tower_of, visual_tokens

__all__ = ["DiffusionLoss", "convert", "train_diffusion"]

STAGE = 17  # key of the seeds: no other training draws the same scenes
MASK = "<mask>"
BLOCK_WEIGHT = 0.3  # weight of masked tokens, relative to the next token (2607.05722)
ANCHORS = 16  # tokens per conversation that are followed by a predicted block
CHECK_SCENES = 8
QUESTIONS = 3  # per scene; few, because their answers have few tokens to mask
DEFAULT_MINUTES = 50.0
FINE_TUNING_FACTOR = 0.3  # of the learning rates: the model is trained already
LEAST_NOISE = 0.1  # least masked share of a block
WHOLLY_MASKED = 0.5  # share of the blocks whose places are all masked, as in their first forward pass
MOST_BEHIND = 64  # most places after the conversation, without blocks


def convert(folder: Path, block_length: int | None) -> tuple[LlavaForConditionalGeneration, Any]:
    """Convert a trained LLaVA to a masked-block model with a mask token, and return it with its processor.

    The default decoding order is left to right, in which the states of a block are the easiest to predict.

    Raises:
        InputError: the language model is neither a Llama nor a converted model.
    """
    processor = AutoProcessor.from_pretrained(folder)
    donor: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    if donor.config.get_text_config().model_type not in ("llama", LLaDAConfig.model_type):
        raise InputError("from", str(folder), "must be a LLaVA whose language model is a Llama")
    processor.tokenizer.add_special_tokens({"additional_special_tokens": [MASK]})
    donor.resize_token_embeddings(len(processor.tokenizer), mean_resizing=False)
    settings = donor.config.to_dict()
    text = {**settings.pop("text_config"), "vocab_size": len(processor.tokenizer)}
    del text["model_type"]
    mask = processor.tokenizer.convert_tokens_to_ids(MASK)
    text |= {"mask_token_id": mask, "block_length": block_length, "predicts": "next"}
    text |= {"is_causal": block_length is not None, "order": "left_to_right"}
    config = LlavaConfig(**{**settings, "text_config": LLaDAConfig(**text).to_dict()})
    model = LlavaForConditionalGeneration(config)
    model.load_state_dict(donor.state_dict())
    model.generation_config = donor.generation_config
    return model, processor


@dataclass(frozen=True)
class SeededBatch:
    """Conversations, and the seed of their masks."""

    batch: ConversationBatch
    seed: int

    def to(self, device: torch.device) -> SeededBatch:
        """Move all tensors."""
        return replace(self, batch=self.batch.to(device))


@dataclass(frozen=True)
class Layout:
    """Sequence of one forward pass: a conversation, followed by masked copies of parts of it.

    Attributes:
        tokens: [B, M] tokens and masks.
        places: [B, M] place of each token in the conversation.
        sees: [B, M, M] attention mask; True where the row attends to the column.
        row, at: [n] rows and places of the sequence with a learnt prediction.
        goal: [n] the predicted tokens.
        weight: [n] weights of their losses.
    """

    tokens: Tensor
    places: Tensor
    sees: Tensor
    row: Tensor
    at: Tensor
    goal: Tensor
    weight: Tensor


def blocks_layout(
    tokens: Tensor, turns: Tensor, mask: int, end: int, block: int, noise: torch.Generator
) -> Layout:
    """Make a sequence of the conversation and a copy of it with masked blocks.

    Each block has its own probability of masks. Masks cover one answer of the block, the first or the last,
    as in decoding. Text before the answer is not masked. Places after the answer contain the end token, and
    are masked and learnt too. Half of the blocks are masked completely, because most forward passes see such
    blocks when each of them decides many places.

    Args:
        tokens: [B, L] of conversations, padded on the right.
        turns: [B, L] index of the answer that a token belongs to; -1 outside answers.
        mask: the mask token.
        end: the token of places after an answer.
        block: block length; places p and q are in the same block if p // block == q // block.
        noise: generator of the masks.
    """
    short = -tokens.shape[1] % block
    tokens, turns = F.pad(tokens, (0, short), value=end), F.pad(turns, (0, short), value=-1)
    (rows, length), device = tokens.shape, tokens.device
    place = torch.arange(length, device=device)
    of = place // block

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=noise).to(device)

    said = turns.view(rows, -1, block)
    first = said.where(said >= 0, said.max() + 1).amin(-1)
    chosen = first.where(drawn(*first.shape) < 0.5, said.amax(-1))[:, :, None]
    own = (said == chosen) & (said >= 0)
    is_last = own & (own.long().flip(-1).cumsum(-1).flip(-1) == 1)
    behind = ((is_last.long().cumsum(-1) == 1) & ~own).flatten(1)
    noisy = tokens.masked_fill(behind, end)

    chance = drawn(*first.shape) * (1 - LEAST_NOISE) + LEAST_NOISE
    chance = chance.masked_fill(drawn(*first.shape) < WHOLLY_MASKED, 1.0)[:, of]
    hidden = (own.flatten(1) | behind) & (drawn(rows, length) < chance)
    hidden[:, 0] = False
    clean_sees = torch.cat(
        [of[:, None] >= of, torch.zeros(length, length, dtype=torch.bool, device=device)], 1
    )
    noisy_sees = torch.cat([of[:, None] > of, of[:, None] == of], 1)
    sees = torch.cat([clean_sees, noisy_sees]).expand(rows, -1, -1)
    row, at = hidden.nonzero(as_tuple=True)
    begins = at % block == 0  # predicted by the last token of the previous block, in the unmasked copy
    return Layout(
        torch.cat([tokens, noisy.masked_fill(hidden, mask)], 1),
        place.repeat(2).expand(rows, -1),
        sees,
        row,
        torch.where(begins, at - 1, length + at - 1),
        noisy[row, at],
        1 / chance[row, at],
    )


def drafts_layout(tokens: Tensor, learnt: Tensor, mask: int, block: int, noise: torch.Generator) -> Layout:
    """Make a sequence of the conversation with the causal mask, and blocks of masks after some tokens.

    A block has `block - 1` masks, which attend to each other and predict the token after each. `learnt`
    [B, L] marks the tokens of answers; for the other arguments see `blocks_layout`.
    """
    rows, length = tokens.shape
    width = block - 1
    place = torch.arange(length, device=tokens.device)
    follows = torch.cat([learnt[:, 1:], torch.zeros_like(learnt[:, :1])], 1)
    drawn = torch.rand(rows, length, generator=noise).to(tokens.device) * follows
    anchor = drawn.topk(min(ANCHORS, length), dim=1).indices  # [B, A]
    ahead = anchor[:, :, None] + 1 + torch.arange(width, device=tokens.device)  # [B, A, K]
    inside = ahead < length - 1
    counted = inside & follows.gather(1, ahead.clamp_max(length - 1).flatten(1)).view_as(ahead)
    counted &= follows.gather(1, anchor)[:, :, None]
    counted = counted.long().cumprod(-1).bool()
    group = torch.arange(anchor.shape[1], device=tokens.device).repeat_interleave(width)
    causal = (place[:, None] >= place).expand(rows, -1, -1)
    behind = place <= anchor.repeat_interleave(width, 1)[:, :, None]
    own = (group[:, None] == group).expand(rows, -1, -1)
    nothing = torch.zeros(rows, length, own.shape[2], dtype=torch.bool, device=tokens.device)
    sees = torch.cat([torch.cat([causal, nothing], 2), torch.cat([behind, own], 2)], 1)
    next_row, next_at = follows.nonzero(as_tuple=True)
    row, lane, step = counted.nonzero(as_tuple=True)
    at = length + lane * width + step
    goal = tokens[row, ahead[row, lane, step] + 1]
    masks = torch.full((rows, own.shape[2]), mask, device=tokens.device)
    drafts = torch.full_like(at, BLOCK_WEIGHT, dtype=torch.float)
    return Layout(
        torch.cat([tokens, masks], 1),
        torch.cat([place.expand(rows, -1), ahead.flatten(1)], 1),
        sees,
        torch.cat([next_row, row]),
        torch.cat([next_at, at]),
        torch.cat([tokens[next_row, next_at + 1], goal]),
        torch.cat([torch.ones_like(next_at, dtype=torch.float), drafts]),
    )


class DiffusionLoss(nn.Module):
    """Cross entropy of the next token, of drafts and of masked blocks.

    Args:
        vlm: the model in training. Its tower and projector are frozen.
        block: block length; None for a single block, without the losses of the next token and of drafts.
        end: the token that ends an answer.
    """

    def __init__(self, vlm: LlavaForConditionalGeneration, block: int | None, end: int) -> None:
        super().__init__()
        self.vlm, self.block, self.end = vlm, block, end
        self.tower = tower_of(vlm, CANVAS)
        for part in (vlm.model.vision_tower, vlm.model.multi_modal_projector):
            part.requires_grad_(False)

    def forward(self, seeded: SeededBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and accuracies: of answers, next tokens, tokens of drafts and masked tokens."""
        batch, noise = seeded.batch, torch.Generator().manual_seed(seeded.seed)
        with torch.no_grad():
            states = patch_states(self.tower.module, batch.pixels)
            visual = visual_tokens(self.vlm, states)
        text: Any = self.vlm.config.text_config
        mask: int = text.mask_token_id
        learnt, total = batch.weights > 0, visual.new_zeros(())
        layouts, block, length = dict[str, Layout](), self.block, batch.tokens.shape[1]
        if block is None:
            block = length + int(torch.randint(MOST_BEHIND, (1,), generator=noise))
        else:
            layouts["next"] = drafts_layout(batch.tokens, learnt, mask, block, noise)
        layouts["masked"] = blocks_layout(batch.tokens, batch.turns, mask, self.end, block, noise)
        figures: dict[str, Tensor] = {}
        for name, layout in layouts.items():
            logits = self.logits(layout, visual)
            nats = F.cross_entropy(logits, layout.goal, reduction="none") * layout.weight
            right = (logits.argmax(-1) == layout.goal).float()
            if name == "next":
                is_next = layout.at < length
                total = total + nats[is_next].mean() + nats[~is_next].sum() / (~is_next).sum().clamp_min(1)
                said = batch.turns[layout.row[is_next], layout.at[is_next] + 1]
                wrong = said[right[is_next] == 0].unique()
                figures["answers"] = 1 - len(wrong) / said.max().add(1)
                figures |= {"next": right[is_next].mean(), "drafts": right[~is_next].mean()}
            else:
                total = total + BLOCK_WEIGHT * nats.mean()
                figures["masked"] = right.mean()
        return total, figures

    def logits(self, layout: Layout, visual: Tensor) -> Tensor:
        """Return the logits [n, V] of the learnt predictions."""
        language = self.vlm.model.language_model
        embedded = language.embed_tokens(layout.tokens)
        is_image = layout.tokens == self.tower.image_token
        if len(visual):  # a place shows the same part of the image in the conversation and in its copies
            length = int(layout.places.max()) + 1
            part = (is_image[:, :length].cumsum(1) - 1).gather(1, layout.places)
            row, at = is_image.nonzero(as_tuple=True)
            parts = visual.view(len(is_image), -1, visual.shape[-1])
            embedded = embedded.index_put((row, at), parts[row, part[row, at]].to(embedded.dtype))
        hidden = language(
            inputs_embeds=embedded,
            attention_mask=layout.sees[:, None],
            position_ids=layout.places,
            use_cache=False,
        ).last_hidden_state
        logits: Tensor = self.vlm.lm_head(hidden[layout.row, layout.at]).float()
        return logits


@flush_subnormals()
def train_diffusion(
    out: str | Path,
    *,
    start: str | Path,
    block_length: int | None = 16,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a masked-block reference model from a LLaVA, and save it as a transformers folder.

    Args:
        out: the folder to write; matrices of its layers are stored in float8.
        start: the trained LLaVA, or a folder that this function wrote.
        block_length: places per block; None for attention between all places.
        how: see `RunOptions`; by default 50 minutes, with 8 scenes per step and process.

    Returns:
        The folder. Its `training.json` records the training.

    Raises:
        InputError: see `convert`.
    """
    out, start = Path(out), Path(start)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=8, check_s=300.0)
    model, processor = convert(start, block_length)
    is_new = AutoConfig.from_pretrained(start).get_text_config().model_type != LLaDAConfig.model_type
    before = [] if is_new else json.loads((start / RECORD).read_text())["stages"]
    tokenizer, visual = processor.tokenizer, tower_of(model, CANVAS).visual_tokens

    def make(step: int) -> SeededBatch:
        process, count = training.accelerator.process_index, training.batch_size
        seeds = training_seeds(training.seed, STAGE, step, process, count)
        batch = conversation_batch(seeds, tokenizer, visual, with_description=True, asked=QUESTIONS)
        return SeededBatch(batch, int(seeds[0]))

    seen = np.arange(CHECK_SCENES)
    held_out = conversation_batch(seen, tokenizer, visual, with_description=True, asked=QUESTIONS)

    def check(module: nn.Module) -> dict[str, float]:
        _, figures = module(SeededBatch(held_out, 0).to(training.accelerator.device))
        return {name: round(float(value), 3) for name, value in figures.items()}

    learner = DiffusionLoss(model, block_length, tokenizer.eos_token_id)
    training.train(Stage("blocks", learner, make, check, slow_factor=FINE_TUNING_FACTOR))

    def save(record: dict[str, Any]) -> None:
        weights = float8_matrices(model, "language_model.layers.")
        save_trained(model, out, record, parts=("vision_config", "text_config"), weights=weights)
        processor.save_pretrained(out)

    options = {"from": start, "block-length": block_length or 0, **training.length}
    return finish(training, out, save, command="diffusion", options=options, model=model, before=before)
