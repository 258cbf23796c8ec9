"""EAGLE (2406.16858): a trained head grows a tree from the target's hidden states."""

from mmspec.plugins import Head, Method

#: The best of nine trees for scenes-llamagen.
IMAGE_TREE = {"num_draft_tokens": 60, "depth": 3, "top_k": 40}
METHODS = (
    Method(
        "eagle",
        "a trained head grows a tree from the target's hidden states",
        "2406.16858",
        head=Head(
            model="mmspec.methods.eagle.head:EagleHead",
            drafter="mmspec.methods.eagle.drafter:EagleDrafter",
            loss="mmspec.methods.eagle.loss:EagleLoss",
            published="mmspec.methods.eagle.published:read_eagle",
            image_settings=IMAGE_TREE,
        ),
        needs="a head that was trained for the target",
        trials=(
            "eagle:num_draft_tokens=8|24",
            "eagle:acceptance=budget:num_draft_tokens=8|24",
            "eagle:acceptance=lantern:num_draft_tokens=8|24",
        ),
    ),
)
