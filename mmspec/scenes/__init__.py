"""Procedural scenes that the reference models are trained on: textured images whose every fact is known.

`sample_scene(seed)` draws a scene, `render` its pixels, `caption`, `describe` and `questions` its words;
`sample_clip` and `render_clip` set it in motion. Every module's `__all__` is public here, but the reader's,
which needs torch.
"""

from mmspec.scenes.contact_sheet import *  # noqa: F403
from mmspec.scenes.image_prompts import *  # noqa: F403
from mmspec.scenes.language import *  # noqa: F403
from mmspec.scenes.render import *  # noqa: F403
from mmspec.scenes.world import *  # noqa: F403
