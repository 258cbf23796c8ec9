"""Processors of the reference models: vocabulary, word-level tokenizer, image preparation, chat template.

All parts are standard classes, so that a saved folder loads without this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    TokenizersBackend,
)

from mmspec.scenes.language import CAPTION_PROMPTS, DESCRIPTION_PROMPTS, PLURALS
from mmspec.scenes.world import BACKGROUNDS, CANVAS, COLOURS, COLUMNS, PATTERNS, ROWS, SHAPES, SIZES

__all__ = [
    "ASSISTANT",
    "BOS",
    "CHAT_TEMPLATE",
    "DIGITS",
    "EOS",
    "IMAGE",
    "PUNCTUATION",
    "USER",
    "build_hybrid_processor",
    "build_processor",
    "build_tokenizer",
    "words",
]

PUNCTUATION = tuple(".,?!:;'\"()-")
DIGITS = tuple("0123456789")
_GRAMMAR = """
a an and of on is it its in the this there that are you do what where how many from to with left right
above below level place size shape colour color pattern background texture fills rest corner picture
pictures image images part object objects named nothing else first second third zero one two three yes no
moves stays still up down
"""
_PEOPLE = """
clip video frame frames which who describe caption tell me i see say please about does has have was his
her they them or not only more most other another same different both all any some next near between
under over than then big bigger smaller larger biggest smallest leftmost rightmost four five six photo
scene long short detail brief hello hi thanks can could would name list count show look at here now
shapes colours colors for be as by
"""


def words() -> tuple[str, ...]:
    """Return all words of the vocabulary in a fixed order, each once."""
    prompts = " ".join(CAPTION_PROMPTS + DESCRIPTION_PROMPTS)
    for mark in PUNCTUATION:
        prompts = prompts.replace(mark, " ")
    sources = [*SHAPES, *PLURALS.values(), *COLOURS, *SIZES, *PATTERNS, *BACKGROUNDS, *ROWS, *COLUMNS]
    return tuple(dict.fromkeys([*sources, *_GRAMMAR.split(), *prompts.split(), *_PEOPLE.split()]))


PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
IMAGE, USER, ASSISTANT, SYSTEM = "<image>", "<user>", "<assistant>", "<system>"
PLACEHOLDERS = {
    "image_token": IMAGE,
    "video_token": "<video>",
    "vision_start_token": "<vision_start>",
    "vision_end_token": "<vision_end>",
}
SPACE = "\u2581"
MAX_LENGTH = 1024

CHAT_TEMPLATE = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<' + message['role'] + '>' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}
                {{- '<image>' }}
            {%- elif part['type'] == 'text' %}
                {{- part['text'] | trim }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
{%- endif %}
"""

#: Puts a token between adjacent images, because a Qwen3.5 counts positions image by image.
HYBRID_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{- '<image>' }}",
    "{{- ('<vision_start>' if loop.previtem is defined and loop.previtem['type'] == 'image' else '')"
    " + '<image>' }}",
)


def build_tokenizer(placeholders: Mapping[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per word, digit and punctuation mark, in lower case.

    As in SentencePiece, a token includes the space before it. Decoding therefore restores spaces exactly.

    Args:
        placeholders: names and texts of the special tokens that a processor looks up as attributes.
    """
    special = [PAD, BOS, EOS, UNKNOWN, IMAGE, USER, ASSISTANT, SYSTEM]
    marks = [*PUNCTUATION, *DIGITS]
    pieces = [*special, *marks, *(SPACE + piece for piece in [*marks, *words()]), *words()]
    tokenizer = Tokenizer(WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    marks_class = r"[\.,\?!:;'\"\(\)\-0-9]"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=True),
            pre_tokenizers.Split(Regex(f"{SPACE}?{marks_class}"), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        extra_special_tokens=[IMAGE, USER, ASSISTANT, SYSTEM],
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        **(placeholders or {}),
    )
    fast.add_tokens(list((placeholders or {}).values()), special_tokens=True)
    return fast


def build_processor(
    patch_size: int = 12, tokenizer: TokenizersBackend | None = None, chat_template: str = CHAT_TEMPLATE
) -> LlavaProcessor:
    """Build a processor: tokenizer (None for `build_tokenizer`), images of 96 x 96 pixels, chat template."""
    images = CLIPImageProcessor(
        size={"shortest_edge": CANVAS},
        crop_size={"height": CANVAS, "width": CANVAS},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer or build_tokenizer(),
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template,
    )


def build_hybrid_processor(patch_size: int = 12) -> Qwen3VLProcessor:
    """Build the processor of a Qwen3.5, which resizes images of any size to about 96 * 96 pixels."""
    size = {"shortest_edge": CANVAS**2, "longest_edge": CANVAS**2}
    how: dict[str, Any] = {"patch_size": patch_size, "size": size}
    how |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**how),
        video_processor=Qwen3VLVideoProcessor(**how),
        tokenizer=build_tokenizer(PLACEHOLDERS),
        chat_template=HYBRID_TEMPLATE,
    )
