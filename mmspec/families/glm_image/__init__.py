"""GLM-Image."""

from mmspec.plugins import Family

FAMILIES = (
    Family(
        "glm_image",
        "mmspec.families.glm_image.target:GlmImageTarget",
        load="mmspec.families.glm_image.prompts:load_glm_image",
        prompts="mmspec.families.glm_image.prompts:image_prompts",
    ),
)
