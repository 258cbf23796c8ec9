"""Training of the reference diffusion model: a LLaVA whose language model learns to fill masked blocks too.

It begins with a trained LLaVA, whose tower and projector stay as they are, and keeps what that one says token
by token. Three things are learnt at once, as converted models do (SDAR, 2510.06303; Nemotron-Labs-Diffusion,
2607.05722):

    the next token, by the causal mask;
    masked tokens of blocks that see themselves and all blocks before, clean;
    all tokens of a block that follows a token, given those before it by the causal mask, for drafts.

Logits at a place are of the next one in all of them, so that the first is what the model does already.

Without blocks all places see each other, images and prompts included (LLaDA, 2502.09992), and the second is
all that is learnt: such a model shows what it costs to keep keys of an image while an answer is decided.
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

STAGE = 7  # that no other training draws its scenes by
MASK = "<mask>"
BLOCK_WEIGHT = 0.3  # of masked tokens, beside the next token (2607.05722)
ANCHORS = 16  # tokens of a conversation behind which a whole block is predicted
CHECK_SCENES = 8
QUESTIONS = 3  # of a scene: their answers have little to mask
DEFAULT_MINUTES = 50.0
FINE_TUNING_FACTOR = 0.3  # of the rates: what it begins with is trained
LEAST_NOISE = 0.1  # share of a block that is masked at least
WHOLLY_MASKED = 0.5  # share of the blocks that are masked as the first forward of each sees them
MOST_BEHIND = 64  # places behind the conversation where all see each other


def convert(folder: Path, block_length: int | None) -> tuple[LlavaForConditionalGeneration, Any]:
    """A trained LLaVA as a model of masked blocks, with one token more, and its processor.

    Its plain order is from left to right, in which the states of a block are the easiest to predict.

    Raises:
        InputError: the LLaVA's language model is neither a Llama nor such a model already.
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
    """Conversations, and the seed of what is masked of them."""

    batch: ConversationBatch
    seed: int

    def to(self, device: torch.device) -> SeededBatch:
        """Move all tensors."""
        return replace(self, batch=self.batch.to(device))


@dataclass(frozen=True)
class Layout:
    """Sequence of one forward pass: the conversation, and masked copies of parts of it behind.

    Attributes:
        tokens: [B, M] with masks.
        places: [B, M] place of each in the conversation.
        sees: [B, M, M] what each attends to.
        row, at: [n] rows and places of the sequence whose logits are learnt.
        goal: [n] tokens that they predict.
        weight: [n] of their losses.
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
    """The conversation, clean, and a copy whose blocks are masked, each with a chance of its own.

    A block is masked as it is decoded: within one answer, first or last of those in it, with what stands
    before in plain sight; places behind the answer hold its end token, and are masked and learnt too. Half of
    the blocks are masked wholly: where many places are decided a forward pass, that is what most forward
    passes see.

    Args:
        tokens: [B, L] of conversations, padded on the right.
        turns: [B, L] number of the answer of each token, -1 elsewhere.
        mask, end: the tokens of a masked place, and of those behind an answer.
        block: places p and q with p // block == q // block are of one block.
        noise: draws the masks.
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
    begins = at % block == 0  # predicted by the last token of the block before, which is clean
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
    """The conversation by the causal mask, and behind some of its tokens a block of masks that sees itself.

    Arguments as of `blocks_layout`; a block has `block - 1` masks, which predict what follows each.
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
    """Cross entropy of the next token, of drafts, and of masked blocks.

    Args:
        vlm: learns, but for its tower and projector.
        block: places of a block; None for one block of the whole conversation, and nothing token by token.
        end: the token that ends an answer.
    """

    def __init__(self, vlm: LlavaForConditionalGeneration, block: int | None, end: int) -> None:
        super().__init__()
        self.vlm, self.block, self.end = vlm, block, end
        self.tower = tower_of(vlm, CANVAS)
        for part in (vlm.model.vision_tower, vlm.model.multi_modal_projector):
            part.requires_grad_(False)

    def forward(self, seeded: SeededBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and shares that are right: answers, next tokens, tokens of drafts and masked ones."""
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
        """[n, V] logits at the places that are learnt."""
        language = self.vlm.model.language_model
        embedded = language.embed_tokens(layout.tokens)
        is_image = layout.tokens == self.tower.image_token
        if len(visual):  # of one image a row, in every copy of the conversation
            copies = int(is_image.sum()) // len(visual)
            rows = visual.view(len(layout.tokens), 1, -1, visual.shape[-1]).expand(-1, copies, -1, -1)
            embedded = embedded.masked_scatter(is_image[..., None], rows.to(embedded.dtype))
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
    """Train a reference model of masked blocks from a LLaVA, and save it as a folder of transformers' layout.

    Args:
        out: the folder to write; matrices of its layers are stored in float8.
        start: the trained LLaVA, or a folder that this function wrote, to go on with.
        block_length: places of a block; None for a model whose places all see each other.
        how: see `RunOptions`; by default 50 minutes, of 8 scenes a step and process.

    Returns:
        The folder. Its `training.json` records how it was made.

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
        return SeededBatch(batch, step)

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
