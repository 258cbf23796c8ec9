"""Procedural scenes that the reference models are trained on: textured images whose every fact is known.

`sample_scene(seed)` draws a scene, `render` its pixels, `caption`, `describe` and `questions` its words;
`sample_clip` and `render_clip` set it in motion.
"""

from mmspec.scenes.contact_sheet import draw_contact_sheet
from mmspec.scenes.image_prompts import ImagePrompt, parse_image_prompt, sample_image_prompt
from mmspec.scenes.language import (
    CAPTION_PROMPTS,
    DESCRIPTION_PROMPTS,
    KINDS,
    CaptionReading,
    Question,
    ask,
    caption,
    describe,
    parse_caption,
    questions,
)
from mmspec.scenes.render import Clip, clip_caption, object_masks, render, render_clip, sample_clip
from mmspec.scenes.world import (
    BACKGROUNDS,
    CANVAS,
    COLOURS,
    COLUMNS,
    GENERAL,
    HELD_OUT_SEEDS,
    IMAGE_TOKENS,
    MAX_OBJECTS,
    PATTERNS,
    ROWS,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    SceneProfile,
    sample_scene,
    training_seeds,
)

__all__ = [
    "BACKGROUNDS",
    "CANVAS",
    "CAPTION_PROMPTS",
    "COLOURS",
    "COLUMNS",
    "GENERAL",
    "DESCRIPTION_PROMPTS",
    "HELD_OUT_SEEDS",
    "IMAGE_TOKENS",
    "KINDS",
    "MAX_OBJECTS",
    "PATTERNS",
    "ROWS",
    "SHAPES",
    "SIZES",
    "CaptionReading",
    "Clip",
    "ImagePrompt",
    "Question",
    "Scene",
    "SceneObject",
    "SceneProfile",
    "ask",
    "caption",
    "clip_caption",
    "describe",
    "draw_contact_sheet",
    "object_masks",
    "parse_caption",
    "parse_image_prompt",
    "questions",
    "render",
    "render_clip",
    "sample_clip",
    "sample_image_prompt",
    "sample_scene",
    "training_seeds",
]
