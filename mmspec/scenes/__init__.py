"""Toy world of the reference models: procedural scenes, rendered as textured images with known contents.

`sample_scene(seed)` samples a scene, `render` draws its pixels, `caption`, `describe` and `questions` return
text; `sample_clip` and `render_clip` animate it. Every module's `__all__` is exported here, except that of
the reader, which needs torch.
"""

from mmspec.scenes.contact_sheet import *  # noqa: F403
from mmspec.scenes.image_prompts import *  # noqa: F403
from mmspec.scenes.language import *  # noqa: F403
from mmspec.scenes.render import *  # noqa: F403
from mmspec.scenes.world import *  # noqa: F403
