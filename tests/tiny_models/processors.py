"""Real processors of each family with an offline word-level tokenizer and tiny image sizes.

All families share one vocabulary (`WORDS`, then the family's special tokens), so decoded outputs are words.
The tokenizer names the placeholder tokens (`tokenizer.image_token`), as published ones do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
    VideoLlavaImageProcessor,
    VideoLlavaProcessor,
    VideoLlavaVideoProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

VOCABULARY_SIZE = 128
PINPOINTS = [[28, 28], [28, 56], [56, 28], [56, 56]]

VOCABULARY_TEXT = """\
a the red green blue yellow circle square triangle star small large left right above below of to and is
are there in on at with what which colour shape how many image video frame frames one two three four
five first last same other user assistant system describe compare then it moves up down not near far
between yes no second seconds from you provided following series H MM SS You User Assistant Frame 00 01 02
0 1 2 3 4 5 6 7 8 9 : . , ? ! < > - [ ]"""
WORDS = VOCABULARY_TEXT.split()

CHAT_TEMPLATE = """\
{%- for message in messages %}{{ 'OPEN' }}{{ message['role'] }}{{ ' : ' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ 'IMAGE' }}
{%- elif part['type'] == 'video' %}{{ 'VIDEO' }}
{%- elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}
{{- 'CLOSE' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'OPENassistant : ' }}{% endif %}"""


@dataclass(frozen=True)
class Special:
    """The special tokens of one family, and where its chat template puts them."""

    image: str
    video: str | None = None
    opening: str = ""
    closing: str = " "
    around: tuple[str, str] = ("", "")
    more: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> list[str]:
        """All of them without repeats, in order."""
        named = [self.image, self.video, self.opening, self.closing.strip(), *self.around, *self.more]
        return list(dict.fromkeys(token for token in named if token))

    @property
    def chat_template(self) -> str:
        """The template: every message as `role : content`, images and clips as placeholders in place."""
        start, end = self.around
        text = CHAT_TEMPLATE.replace("OPEN", self.opening).replace("CLOSE", self.closing)
        return text.replace("IMAGE", start + self.image + end).replace("VIDEO", start + str(self.video) + end)


TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
LLAVA = Special("<image>")
LLAVA_VIDEO = Special("<image>", "<video>")
QWEN = Special(
    "<|image_pad|>",
    "<|video_pad|>",
    opening="<|im_start|>",
    closing="<|im_end|>",
    around=("<|vision_start|>", "<|vision_end|>"),
)
IDEFICS = Special(
    "<image>",
    opening="<|im_start|>",
    closing="<end_of_utterance>",
    more=("<fake_token_around_image>", "<global-img>", *TILES),
)
SMOL = Special("<image>", "<video>", IDEFICS.opening, IDEFICS.closing, more=IDEFICS.more)
SPECIAL = {
    "llava": LLAVA,
    "llava_next": LLAVA,
    "llava_onevision": LLAVA_VIDEO,
    "video_llava": LLAVA_VIDEO,
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "idefics3": IDEFICS,
    "smolvlm": SMOL,
}


def tiny_tokenizer(special: Special = LLAVA, **named: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: <pad> 0, <s> 1, </s> 2, <unk> 3, the words, the family's special tokens.

    Further attributes with the name of a token may be `named`.
    """
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *WORDS, *special.tokens]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"image_token": special.image, **named} | (
        {"video_token": special.video} if special.video else {}
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=names,
    )
    fast.add_tokens(special.tokens, special_tokens=True)
    return fast


def _clip_size() -> dict[str, Any]:
    """28 by 28 images for the CLIP-like image processors."""
    return {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


def _idefics_size() -> dict[str, Any]:
    """Tiles of 32 by 32: an image becomes up to 2 by 2 tiles and one global view."""
    return {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}


def _qwen_size(patch: int, least: int, most: int) -> dict[str, Any]:
    """Between `least` and `most` visual tokens (of 2 by 2 patches), whatever the size of the image."""
    unit = (2 * patch) ** 2
    return {"patch_size": patch, "size": {"shortest_edge": least * unit, "longest_edge": most * unit}}


def build_processor(family: str) -> ProcessorMixin:
    """The processor of a family; see `vision_language` for what each one returns."""
    special = SPECIAL[family]
    parts: dict[str, Any] = {"tokenizer": tiny_tokenizer(special), "chat_template": special.chat_template}
    llava = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    match family:
        case "llava":
            return LlavaProcessor(image_processor=CLIPImageProcessor(**_clip_size()), **llava, **parts)
        case "llava_next":
            image_processor = LlavaNextImageProcessor(image_grid_pinpoints=PINPOINTS, **_clip_size())
            return LlavaNextProcessor(image_processor=image_processor, **llava, **parts)
        case "llava_onevision":
            square = {"height": 28, "width": 28}
            return LlavaOnevisionProcessor(
                image_processor=LlavaOnevisionImageProcessor(size=square, image_grid_pinpoints=PINPOINTS),
                video_processor=LlavaOnevisionVideoProcessor(size=square),
                num_image_tokens=4,
                vision_feature_select_strategy="full",
                **parts,
            )
        case "video_llava":
            return VideoLlavaProcessor(
                image_processor=VideoLlavaImageProcessor(**_clip_size()),
                video_processor=VideoLlavaVideoProcessor(**_clip_size()),
                **llava,
                **parts,
            )
        case "qwen2_vl" | "qwen2_5_vl":
            kind = Qwen2VLProcessor if family == "qwen2_vl" else Qwen2_5_VLProcessor
            return kind(
                image_processor=Qwen2VLImageProcessor(**_qwen_size(14, 4, 9)),
                video_processor=Qwen2VLVideoProcessor(**_qwen_size(14, 4, 9), cap_pixels_per_frame=False),
                **parts,
            )
        case "qwen3_vl":
            return Qwen3VLProcessor(
                image_processor=Qwen2VLImageProcessor(**_qwen_size(16, 4, 9)),
                video_processor=Qwen3VLVideoProcessor(
                    **_qwen_size(16, 16, 36), do_sample_frames=False, cap_pixels_per_frame=False
                ),
                **parts,
            )
        case "idefics3":
            image_processor = Idefics3ImageProcessor(**_idefics_size())
            return Idefics3Processor(image_processor=image_processor, image_seq_len=4, **parts)
        case "smolvlm":
            # The class refuses to be built without num2words, which it needs for the word "four" in the
            # introduction of a clip alone; `str` says "4" and keeps the family testable without the package.
            processing_smolvlm.num2words = processing_smolvlm.num2words or str
            return SmolVLMProcessor(
                image_processor=SmolVLMImageProcessor(**_idefics_size()),
                # Without a frame count and a rate, frames are taken as they come (see `vision_language`).
                video_processor=SmolVLMVideoProcessor(num_frames=None, fps=None, **_idefics_size()),
                image_seq_len=4,
                **parts,
            )
    raise ValueError(f"no such family: {family}")
