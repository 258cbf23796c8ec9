"""GLM-Image."""

from mmspec.plugins import Family

FAMILIES = (Family("glm_image", "mmspec.families.glm_image.target:GlmImageTarget"),)
