"""The reference models with continuous image tokens: their shapes and their losses."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mmspec.families.mar.modeling import MARConfig, MARForImageGeneration
from mmspec.families.nextstep.modeling import SPECIAL_TOKENS, NextStepConfig, NextStepForImageGeneration
from mmspec.scenes.reader import label_heads
from mmspec.vectors.denoising_head import DDPMSchedule, DenoisingHead, FlowSchedule
from mmspec.vectors.denoising_head.schedule import TRAINING_STEPS, DDPMTables
from reference.image_data import CAPTION_CLASSES, CLASSES, GRID, ImageBatch
from reference.image_model import (
    BESIDE_OBJECT,
    beside_objects,
    build_caption_tokenizer,
    place_loss,
)
from reference.vlm_data import IGNORED, PATCH_CLASSES
from reference.vlm_model import label_loss

__all__ = [
    "LATENT_CHANNELS",
    "LATENT_SHAPES",
    "LatentBatch",
    "MARLoss",
    "NextStepDraftLoss",
    "NextStepLoss",
    "build_latent_tokenizer",
    "build_mar",
    "build_nextstep",
]

LATENT_CHANNELS = 8
AREA = f"{GRID}*{GRID}"
PLACE_WEIGHT = 0.5
CAPTION_WEIGHT = 0.5
NOISES = 2  # noises per token and step; the head is cheap compared with the model that conditions it
# Share of the cells to predict. The published values are 1, .25 and .7 (2406.11838, section 4). A small model
# also needs examples with more known cells.
MASK_MEAN, MASK_STD, LEAST_MASK = 1.0, 0.4, 0.2


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths and depths of the two kinds of model."""

    width: int
    layers: int
    heads: int
    inner: int
    head_width: int
    head_depth: int


LATENT_SHAPES = {
    "nextstep": {
        "base": LatentShape(width=128, layers=5, heads=4, inner=320, head_width=112, head_depth=3),
        "draft": LatentShape(width=64, layers=2, heads=2, inner=160, head_width=48, head_depth=2),
        "tiny": LatentShape(width=16, layers=2, heads=2, inner=24, head_width=16, head_depth=1),
    },
    "mar": {
        "base": LatentShape(width=80, layers=2, heads=4, inner=320, head_width=80, head_depth=3),
        "half": LatentShape(width=48, layers=2, heads=4, inner=192, head_width=48, head_depth=2),
        "tiny": LatentShape(width=16, layers=1, heads=2, inner=32, head_width=16, head_depth=1),
    },
}
"""The reference models, their draft models ("draft" and "half"), and models for tests. A MAR has `layers`
layers in its encoder and as many in its decoder."""


@dataclass(frozen=True)
class LatentBatch(ImageBatch):
    """Images with prompts, and their scaled latents [B, 256, 8] in raster order."""

    latents: Tensor

    @classmethod
    def of(cls, batch: ImageBatch, latents: Tensor) -> LatentBatch:
        """Add latents [B, 8, 16, 16] to a batch."""
        parts = {field.name: getattr(batch, field.name) for field in fields(ImageBatch)}
        return cls(**parts, latents=latents.flatten(2).transpose(1, 2))


def build_latent_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of captions, with the special tokens of NextStep."""
    tokenizer = build_caption_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.add_tokens([AREA])
    return tokenizer


def build_nextstep(shape: LatentShape, tokenizer: PreTrainedTokenizerFast) -> NextStepForImageGeneration:
    """Build a NextStep with random weights, for images of 16 x 16 latents of 8 channels."""
    begin, end, placeholder = (tokenizer.get_vocab()[name] for name in SPECIAL_TOKENS[1:4])
    config = NextStepConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=512,
        attention_bias=True,
        o_attention_bias=False,
        latent_size=GRID,
        latent_patch_size=1,
        latent_channels=LATENT_CHANNELS,
        fm_head_dim=shape.head_width,
        fm_head_layers=shape.head_depth,
        use_gen_pos_embed=True,
        gen_pos_grid=GRID,
        boi=begin,
        eoi=end,
        image_placeholder_id=placeholder,
        pad_token_id=tokenizer.pad_token_id,
    )
    return NextStepForImageGeneration(config)


def build_mar(shape: LatentShape) -> MARForImageGeneration:
    """Build a MAR of 48 classes with random weights."""
    config = MARConfig(
        hidden_size=shape.width,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        num_attention_heads=shape.heads,
        mlp_ratio=shape.inner / shape.width,
        token_size=LATENT_CHANNELS,
        grid_size=GRID,
        buffer_size=8,
        num_classes=CLASSES,
        head_width=shape.head_width,
        head_depth=shape.head_depth,
    )
    return MARForImageGeneration(config)


def head_loss(head: DenoisingHead, x0: Tensor, condition: Tensor) -> Tensor:
    """Training loss of a denoising head for each token, at a random time.

    "ddpm": squared error of the noise, plus the variational bound in bits, which trains the variance alone
    (L_hybrid of 2102.09672: 0.001 times the bound's 1,000 terms, of which one is drawn). In its first term a
    token has a density, where pixels would have bins. "flow": squared error of the velocity at a logit-normal
    time (`stepfun-ai/NextStep-1, nextstep/models/modeling_fm_head.py`).

    Args:
        head: the head, in single precision.
        x0: [M, d] tokens.
        condition: [M, D].

    Returns:
        [M], the mean over the d numbers of a token.
    """
    noise = torch.randn_like(x0)
    if head.config.kind == "flow":
        times = torch.sigmoid(torch.randn(len(x0), device=x0.device, dtype=x0.dtype))
        state = torch.lerp(noise, x0, times[:, None])
        velocity: Tensor = head.net(state, times, condition)
        return (velocity - (x0 - noise)).square().mean(-1)
    step = torch.randint(TRAINING_STEPS, (len(x0),), device=x0.device)
    schedule = DDPMSchedule(TRAINING_STEPS).to(x0.device, x0.dtype)
    tables = DDPMTables(*(table[step] for table in schedule.tables))
    output: Tensor = head.net(tables.signal * x0 + tables.noise * noise, schedule.times[step], condition)
    predicted, value = output.chunk(2, dim=-1)
    error = predicted - noise
    # the means of posterior and model are the same function of state and noise
    apart = (tables.of_noise * error.detach()).square()
    log_posterior = tables.log_posterior
    log_variance = torch.lerp(log_posterior, tables.log_beta, (value + 1) / 2)
    surprise = log_variance + apart * torch.exp(-log_variance)
    divergence = surprise - 1 - log_posterior + torch.exp(log_posterior - log_variance)
    likelihood = surprise + math.log(2 * math.pi)
    bound = torch.where((step == TRAINING_STEPS - 1)[:, None], likelihood, divergence)
    return error.square().mean(-1) + bound.mean(-1) / (2 * math.log(2))


class NextStepLoss(nn.Module):
    """Loss of the image head, and the two auxiliary losses of `ImageLoss`.

    One linear layer per label reads a state in the middle layer of the decoder: before each image token the
    labels of its place, and at the end of the prompt the attributes that the prompt names.

    Args:
        model: the model in training.
        tokenizer: tokenizer of the prompts.
    """

    def __init__(self, model: NextStepForImageGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.model = model
        ids = tokenizer.convert_tokens_to_ids([SPECIAL_TOKENS[0], AREA, SPECIAL_TOKENS[1]])
        self.ending: Tensor
        self.register_buffer("ending", torch.tensor(ids), persistent=False)
        self.place_heads = label_heads(model.config.hidden_size, PATCH_CLASSES)
        self.caption_heads = label_heads(model.config.hidden_size, CAPTION_CLASSES)

    def forward(self, batch: LatentBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: squared error of the velocity, accuracy of both auxiliary losses."""
        images, length = batch.latents.shape[:2]
        words, seen = with_ending(batch, self.ending)
        conditions, middle = read_images(self.model, batch.latents, words[:images], seen[:images])
        before = words.shape[1] - 1
        tokens, given = (each.flatten(0, 1).repeat(NOISES, 1) for each in (batch.latents, conditions))
        losses = head_loss(self.model.image_head, tokens, given).view(NOISES, images, length).mean(0)
        covered = batch.place_labels[..., 0] > 0
        weights = 1 + (BESIDE_OBJECT - 1) * beside_objects(covered)
        loss = (losses * weights).sum() / weights.sum()
        place, placed = place_loss(middle[:, before:], batch, self.place_heads)
        asked_of = middle[:, before]
        if len(words) > images:  # prompts without images, which cost almost nothing
            _, more = read_rows(self.model, self.model.embed(words[images:]), seen[images:])
            asked_of = torch.cat([asked_of, more[:, before]])
        labels = batch.caption_labels.masked_fill(batch.dropped[:, None], IGNORED)
        caption, asked = label_loss(asked_of, labels, self.caption_heads)
        figures = {"velocity": losses.mean(), "places": placed, "asked": asked}
        return loss + PLACE_WEIGHT * place + CAPTION_WEIGHT * caption, figures


class NextStepDraftLoss(nn.Module):
    """KL divergence of a draft model's denoising chains from those of its target, on the latents of scenes.

    Each token is evaluated at one random step of the chain, and the result is multiplied by the number of
    steps. Both models have the same transition noise, so that the divergence of a step depends only on the
    squared distance of the means.

    Args:
        model: the draft model in training.
        target: the frozen target.
        tokenizer: tokenizer of the prompts of both models.
    """

    def __init__(
        self,
        model: NextStepForImageGeneration,
        target: NextStepForImageGeneration,
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        super().__init__()
        self.model = model
        self._frozen = (target.requires_grad_(False).eval(),)  # in a tuple, so that it is not a submodule
        self.ending: Tensor
        ids = tokenizer.convert_tokens_to_ids([SPECIAL_TOKENS[0], AREA, SPECIAL_TOKENS[1]])
        self.register_buffer("ending", torch.tensor(ids), persistent=False)
        self.schedule = FlowSchedule(last_step_noise=True)

    def forward(self, batch: LatentBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the divergence in nats per token, as loss and as figure."""
        images = len(batch.latents)
        words, seen = with_ending(batch, self.ending)
        rows = batch.latents, words[:images], seen[:images]
        (target,) = self._frozen
        with torch.no_grad():
            expected, _ = read_images(target, *rows)
        conditions, _ = read_images(self.model, *rows)
        clean = batch.latents.flatten(0, 1)
        step = torch.randint(self.schedule.steps, (len(clean),), device=clean.device)
        schedule = self.schedule.to(clean.device)
        times = schedule.times[step]
        states = torch.lerp(torch.randn_like(clean), clean, times[:, None])
        with torch.no_grad():
            goal = target.image_head.net(states, times, expected.flatten(0, 1))
        velocity = self.model.image_head.net(states, times, conditions.flatten(0, 1))
        zeros = torch.zeros_like(clean).expand(schedule.steps, -1, -1)
        mean, std = schedule.transition(zeros, slice(None), torch.ones_like(zeros))
        weight = (mean / std).square()[step, 0, 0] / 2  # of the velocity's error in a step's divergence
        nats = schedule.steps * (weight * (velocity - goal).square().sum(-1)).mean()
        return nats, {"nats": nats}


def with_ending(batch: LatentBatch, ending: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompts [B + P, L] with the tokens before an image, and their mask, 0 at dropped prompts."""
    seen = batch.word_mask.masked_fill(batch.dropped[:, None], 0)
    words = torch.cat([batch.words, ending.expand(len(seen), -1)], 1)
    return words, torch.cat([seen, seen.new_ones(len(seen), len(ending))], 1)


def read_images(
    model: NextStepForImageGeneration, latents: Tensor, words: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the conditions [B, N, D] of images [B, N, d] after prompts [B, L], and middle hidden states."""
    images, length = latents.shape[:2]
    rows = torch.cat([model.embed(words), model.embed(latents[:, :-1])], 1)
    last, middle = read_rows(model, rows, torch.cat([seen, seen.new_ones(images, length - 1)], 1))
    places = torch.arange(length, device=last.device)
    hidden = last[:, words.shape[1] - 1 :] + model.gen_pos_embed[0, places]
    return model.image_out_projector(hidden), middle


def read_rows(model: NextStepForImageGeneration, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the final and middle hidden states [B, n, D] of rows that are padded on the left."""
    output = model.get_decoder()(
        inputs_embeds=rows,
        attention_mask=seen,
        position_ids=(seen.cumsum(-1) - 1).clamp_min(0),
        use_cache=False,
        output_hidden_states=True,
    )
    return output.last_hidden_state, output.hidden_states[model.config.num_hidden_layers // 2]


class MARLoss(nn.Module):
    """Loss of the diffusion head at masked cells, as in the training of MAR (2406.11838, section 4).

    Cells of objects and next to objects have a larger weight. In an auxiliary loss, one linear layer per
    label reads the labels of each place from its condition.

    Args:
        model: the model in training.
    """

    def __init__(self, model: MARForImageGeneration) -> None:
        super().__init__()
        self.model = model
        self.place_heads = label_heads(model.config.hidden_size, PATCH_CLASSES)

    def forward(self, batch: LatentBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: the loss of the head, and the accuracy of the labels of places."""
        images, cells = batch.latents.shape[:2]
        device = batch.latents.device
        labels = torch.where(batch.dropped[:images], CLASSES, batch.class_labels)
        share = torch.empty((), device=device)
        nn.init.trunc_normal_(share, MASK_MEAN, MASK_STD, LEAST_MASK, 1.0)
        hidden = max(1, min(cells, round(cells * float(share))))
        order = torch.rand(images, cells, device=device).argsort(-1)
        known = torch.ones_like(order, dtype=torch.bool).scatter(1, order[:, :hidden], False)
        conditions = self.model.conditions(batch.latents, known, labels)
        at = ~known
        tokens, given = (each[at].repeat(NOISES, 1) for each in (batch.latents, conditions))
        losses = head_loss(self.model.diffloss, tokens, given)
        covered = batch.place_labels[..., 0] > 0
        near = torch.maximum(covered.float(), beside_objects(covered))
        weights = (1 + (BESIDE_OBJECT - 1) * near)[at].repeat(NOISES)
        loss = (losses * weights).sum() / weights.sum()
        place, placed = place_loss(conditions, batch, self.place_heads)
        return loss + PLACE_WEIGHT * place, {"noise": losses.mean(), "places": placed}
