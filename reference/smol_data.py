"""Batches for scenes-smol: one image, pair of images or clip, one prompt and one reply a row.

Every batch is new and depends on its seeds alone. A step's rows are of one kind, so that nearly nothing is
padded, and images of several halve their number, so that steps take equally long.
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

#: SmolLM2's own, without its system prompt, which would take longer to read than an image.
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
"""Shares of the steps that are of a kind; a question teaches a word or two, where a caption teaches ten."""

FRAMES = 4
SEVERAL = ("pair", "clip")
CAPTIONED = 0.5  # of pairs; the others are asked of one of their images
NO_FULL_STOP = 0.15  # people forget it, and the model should not mind
MORE_PROMPTS = {
    "pair": ("describe the two pictures.", "describe both images.", "what is in the two pictures?"),
    "clip": ("describe the clip.", "what happens in the clip?", "what moves?"),
}


@dataclass(frozen=True)
class Turn:
    """A prompt about images `[H, W, 3]`, and what is said to it, its end included.

    `named` are the mentions of objects in the prompt, as `vlm_data.mentions` returns them.
    """

    images: Sequence[np.ndarray]
    prompt: str
    reply: str
    named: Sequence[tuple[int, list[int]]] = field(default=())


@dataclass(frozen=True)
class SpokenBatch(TensorBatch):
    """Images `[N, 3, 96, 96]` in [-1, 1], tokens `[B, L]` padded on the right, and which of them are learnt.

    `learnt` `[B, L]` is True at the tokens of replies, their ends included. `mention_at` `[M, 2]` holds row
    and position of each mention of objects in a question, and `mention_labels` `[M, len(MENTION_CLASSES)]`
    its labels.
    """

    pixels: Tensor
    tokens: Tensor
    learnt: Tensor
    mention_at: Tensor
    mention_labels: Tensor


@dataclass(frozen=True)
class RepliesBatch(SpokenBatch):
    """The same, and the replies once more behind words that say what the images show.

    `told` and `told_learnt` are what `tokens` and `learnt` are; both hold the same replies.
    """

    told: Tensor
    told_learnt: Tensor


def spoken_batch(
    seeds: np.ndarray, kind: str, tokenizer: PreTrainedTokenizerBase, visual_tokens: int
) -> SpokenBatch:
    """A row for each seed; of several images, for every other one.

    Args:
        seeds: of the scenes.
        kind: a key of `SHARES`.
        tokenizer: of the model.
        visual_tokens: of an image.
    """
    chosen = seeds[: max(1, len(seeds) // 2)] if kind in SEVERAL else seeds
    turns = [make_turn(int(seed), kind) for seed in chosen]
    return spoken(turns, tokenizer, visual_tokens)


def captioned(seed: int, kind: str) -> Turn:
    """The images of a seed with their only right caption; the prompt is left open."""
    if kind == "pair":
        reply = caption_pair(*(caption(sample_scene(one)) for one in (seed, other_seed(seed))))
    elif kind == "clip":
        reply = caption_clip(sample_clip(seed, frames=FRAMES))
    else:
        reply = caption(sample_scene(seed))
    return Turn(images_of(kind, seed), "", reply)


def make_turn(seed: int, kind: str) -> Turn:
    """Make a prompt and its only right reply; equal arguments give equal turns."""
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
    """The images of a seed: one, or a pair, or the frames of a clip."""
    if kind == "clip":
        return list(render_clip(sample_clip(seed, frames=FRAMES)))
    seeds = (seed, other_seed(seed)) if kind == "pair" else (seed,)
    return [render(sample_scene(one)) for one in seeds]


def other_seed(seed: int) -> int:
    """The seed of the second image of a pair, held out exactly where the first one's is."""
    rng = np.random.default_rng([seed, 0x0783])
    first, last = (0, HELD_OUT_SEEDS.stop) if seed in HELD_OUT_SEEDS else (HELD_OUT_SEEDS.stop, 2**62)
    return int(rng.integers(first, last))


def caption_pair(one: str, other: str) -> str:
    """Two captions in one reply."""
    return f"first: {one} second: {other}"


def caption_clip(clip: Clip) -> str:
    """One sentence with every object, from left to right in the first frame, and where it goes."""
    told = [
        f"a {name(thing)} " + ("stays still" if way == "still" else f"moves {way}")
        for thing, way in zip(clip.scene.objects, clip.directions, strict=True)
    ]
    return ", ".join(told) + f" on {clip.scene.background}."


def spoken(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, visual_tokens: int) -> SpokenBatch:
    """Turns as the model reads them, in its chat template."""
    shown = [IMAGE * visual_tokens * len(turn.images) + turn.prompt for turn in turns]
    tokens, learnt = encode(shown, [turn.reply for turn in turns], tokenizer)
    return SpokenBatch(pixels_of(turns), tokens, learnt, *locate(turns, shown, tokenizer))


def locate(
    turns: Sequence[Turn], shown: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor]:
    """Row and position [M, 2] of the last token of each mention of turns, and its labels [M, 8]."""
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
    """Tokens [B, L] of prompts with their replies, and which of them are the replies': bool [B, L]."""
    asked = tokenizer([OPENING + prompt + ANSWERING for prompt in prompts], add_special_tokens=False)
    said = tokenizer(list(replies), add_special_tokens=False)
    rows, learnt = [], []
    for before, after in zip(asked["input_ids"], said["input_ids"], strict=True):
        rows.append(torch.tensor([*before, *after]))
        learnt.append(torch.arange(len(before) + len(after)) >= len(before))
    padded = pad_sequence(rows, batch_first=True, padding_value=int(tokenizer.pad_token_id))
    return padded, pad_sequence(learnt, batch_first=True)


def pixels_of(turns: Sequence[Turn]) -> Tensor:
    """All images of turns `[N, 3, H, W]` in [-1, 1]."""
    images = np.stack([image for turn in turns for image in turn.images])
    return rearrange(torch.from_numpy(images), "n h w c -> n c h w").float().div_(127.5).sub_(1).contiguous()
