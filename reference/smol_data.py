"""Batches for scenes-smol: each row has one image, pair of images or clip, one prompt and one reply.

Every batch is new and depends on its seeds alone. All rows of a step are of one kind, which avoids padding.
Steps with pairs or clips have half as many rows, so that all steps take equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from mmspec.scenes import (
    CAPTION_PROMPTS,
    HELD_OUT_SEEDS,
    Clip,
    caption,
    questions,
    render,
    render_clip,
    sample_clip,
    sample_scene,
)
from mmspec.scenes.language import name
from mmspec.training.data.sequences import TensorBatch
from reference.vlm_data import MENTION_CLASSES, mentions

__all__ = [
    "CHAT_TEMPLATE",
    "FRAMES",
    "IMAGE",
    "RepliesBatch",
    "SHARES",
    "SpokenBatch",
    "Turn",
    "caption_clip",
    "caption_pair",
    "captioned",
    "encode",
    "images_of",
    "locate",
    "make_turn",
    "other_seed",
    "pixels_of",
    "spoken",
    "spoken_batch",
]

IMAGE = "<image>"
OPENING, ANSWERING, CLOSING = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"

#: The template of SmolLM2 without its system prompt, which has more tokens than an image.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- '<image>' if part['type'] == 'image' else part['text'] if part['type'] == 'text' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SHARES = {"caption": 0.2, "question": 0.5, "pair": 0.15, "clip": 0.15}
"""Share of the steps for each kind. Questions have the largest, because an answer has one or two words."""

FRAMES = 4
SEVERAL = ("pair", "clip")
CAPTIONED = 0.5  # share of pairs with a caption; the others have a question about one of the images
NO_FULL_STOP = 0.15  # share of prompts without their last character, since users omit the full stop
MORE_PROMPTS = {
    "pair": ("describe the two pictures.", "describe both images.", "what is in the two pictures?"),
    "clip": ("describe the clip.", "what happens in the clip?", "what moves?"),
}


@dataclass(frozen=True)
class Turn:
    """A prompt about images, and its reply.

    Attributes:
        images: `[H, W, 3]` each.
        prompt: text of the prompt, without image tokens.
        reply: text of the reply, with its end token.
        named: the mentions of objects in the prompt, as `vlm_data.mentions` returns them.
    """

    images: Sequence[np.ndarray]
    prompt: str
    reply: str
    named: Sequence[tuple[int, list[int]]] = field(default=())


@dataclass(frozen=True)
class SpokenBatch(TensorBatch):
    """A batch of prompts and replies about images.

    Attributes:
        pixels: [N, 3, 96, 96] in [-1, 1].
        tokens: [B, L], padded on the right.
        learnt: [B, L], True at the tokens of replies, including their end tokens.
        mention_at: [M, 2] row and position of each mention of objects in a question.
        mention_labels: [M, len(MENTION_CLASSES)] labels of the mentions.
    """

    pixels: Tensor
    tokens: Tensor
    learnt: Tensor
    mention_at: Tensor
    mention_labels: Tensor


@dataclass(frozen=True)
class RepliesBatch(SpokenBatch):
    """A batch that contains each reply twice: given the images, and given a description of them in words.

    `told` and `told_learnt` correspond to `tokens` and `learnt`, with descriptions in place of the images.
    """

    told: Tensor
    told_learnt: Tensor


def spoken_batch(
    seeds: np.ndarray, kind: str, tokenizer: PreTrainedTokenizerBase, visual_tokens: int
) -> SpokenBatch:
    """Make a row for each seed; for pairs and clips, only for the first half of the seeds.

    Args:
        seeds: seeds of the scenes.
        kind: a key of `SHARES`.
        tokenizer: tokenizer of the model.
        visual_tokens: visual tokens per image.
    """
    chosen = seeds[: max(1, len(seeds) // 2)] if kind in SEVERAL else seeds
    turns = [make_turn(int(seed), kind) for seed in chosen]
    return spoken(turns, tokenizer, visual_tokens)


def captioned(seed: int, kind: str) -> Turn:
    """Return the images of a seed and their only correct caption, with an empty prompt."""
    if kind == "pair":
        reply = caption_pair(*(caption(sample_scene(one)) for one in (seed, other_seed(seed))))
    elif kind == "clip":
        reply = caption_clip(sample_clip(seed, frames=FRAMES))
    else:
        reply = caption(sample_scene(seed))
    return Turn(images_of(kind, seed), "", reply)


def make_turn(seed: int, kind: str) -> Turn:
    """Make a prompt and its only correct reply; equal arguments give equal turns."""
    rng = np.random.default_rng([seed, 0x5301])
    place = int(rng.integers(2)) if kind == "pair" else 0
    if kind == "question" or (kind == "pair" and rng.random() >= CAPTIONED):
        scene = sample_scene(other_seed(seed) if place else seed)
        asked, images = questions(scene, rng, 1)[0], images_of(kind, seed)
        which = f"in the {('first', 'second')[place]} picture, " if kind == "pair" else ""
        named = [(len(which) + last, labels) for last, labels in mentions(scene, asked.text)]
        turn = Turn(images, which + asked.text, asked.answer, named)
    else:
        prompts = CAPTION_PROMPTS + MORE_PROMPTS.get(kind, ())
        turn = replace(captioned(seed, kind), prompt=str(rng.choice(prompts)))
    prompt = turn.prompt[:-1] if rng.random() < NO_FULL_STOP else turn.prompt
    return replace(turn, prompt=prompt, reply=turn.reply + CLOSING)


def images_of(kind: str, seed: int) -> list[np.ndarray]:
    """Return the images of a seed: one image, a pair, or the frames of a clip."""
    if kind == "clip":
        return list(render_clip(sample_clip(seed, frames=FRAMES)))
    seeds = (seed, other_seed(seed)) if kind == "pair" else (seed,)
    return [render(sample_scene(one)) for one in seeds]


def other_seed(seed: int) -> int:
    """Return the seed of the second image of a pair; it is held out exactly if the first seed is."""
    rng = np.random.default_rng([seed, 0x0783])
    first, last = (0, HELD_OUT_SEEDS.stop) if seed in HELD_OUT_SEEDS else (HELD_OUT_SEEDS.stop, 2**62)
    return int(rng.integers(first, last))


def caption_pair(one: str, other: str) -> str:
    """Join two captions to one reply."""
    return f"first: {one} second: {other}"


def caption_clip(clip: Clip) -> str:
    """Describe each object of a clip and its movement, from left to right in the first frame."""
    told = [
        f"a {name(thing)} " + ("stays still" if way == "still" else f"moves {way}")
        for thing, way in zip(clip.scene.objects, clip.directions, strict=True)
    ]
    return ", ".join(told) + f" on {clip.scene.background}."


def spoken(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, visual_tokens: int) -> SpokenBatch:
    """Encode turns with the model's chat template."""
    shown = [IMAGE * visual_tokens * len(turn.images) + turn.prompt for turn in turns]
    tokens, learnt = encode(shown, [turn.reply for turn in turns], tokenizer)
    return SpokenBatch(pixels_of(turns), tokens, learnt, *locate(turns, shown, tokenizer))


def locate(
    turns: Sequence[Turn], shown: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor]:
    """Return the row and position [M, 2] of the last token of each mention, and the labels [M, 8]."""
    asked = tokenizer([OPENING + text for text in shown], add_special_tokens=False)
    places, labels = [], []
    for row, (turn, text) in enumerate(zip(turns, shown, strict=True)):
        before = len(OPENING) + len(text) - len(turn.prompt)
        for last, label in turn.named:
            places.append((row, asked.char_to_token(row, before + last)))
            labels.append(label)
    made = torch.tensor(places, dtype=torch.long).reshape(-1, 2)
    return made, torch.tensor(labels, dtype=torch.long).reshape(-1, len(MENTION_CLASSES))


def encode(
    prompts: Sequence[str], replies: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor]:
    """Return the tokens [B, L] of prompts and replies, and a mask [B, L] of the tokens of replies."""
    asked = tokenizer([OPENING + prompt + ANSWERING for prompt in prompts], add_special_tokens=False)
    said = tokenizer(list(replies), add_special_tokens=False)
    rows, learnt = [], []
    for before, after in zip(asked["input_ids"], said["input_ids"], strict=True):
        rows.append(torch.tensor([*before, *after]))
        learnt.append(torch.arange(len(before) + len(after)) >= len(before))
    padded = pad_sequence(rows, batch_first=True, padding_value=int(tokenizer.pad_token_id))
    return padded, pad_sequence(learnt, batch_first=True)


def pixels_of(turns: Sequence[Turn]) -> Tensor:
    """Return all images of turns as `[N, 3, H, W]` in [-1, 1]."""
    images = np.stack([image for turn in turns for image in turn.images])
    return rearrange(torch.from_numpy(images), "n h w c -> n c h w").float().div_(127.5).sub_(1).contiguous()
