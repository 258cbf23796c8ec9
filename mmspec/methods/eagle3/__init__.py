"""EAGLE-3 (2503.01840): a drafting head over the target's hidden states of three depths."""

from mmspec.plugins import Head, Method

#: The fastest of nine trees for scenes-llamagen.
IMAGE_TREE = {"num_draft_tokens": 60, "depth": 3, "top_k": 40}
METHODS = (
    Method(
        "eagle3",
        "grows a tree with a trained layer on the target's hidden states of three depths",
        "2503.01840",
        drafter="mmspec.methods.eagle3.drafter:Eagle3Drafter",
        head=Head(
            model="mmspec.methods.eagle3.head:Eagle3Head",
            loss="mmspec.methods.eagle3.loss:Eagle3Loss",
            published="mmspec.methods.eagle3.published:read_eagle3",
            image_settings=IMAGE_TREE,
            exports={
                "speculators": "mmspec.methods.eagle3.export:write_head",
                "specforge": "mmspec.methods.eagle3.export:write_head",
            },
        ),
        needs="a head that was trained for the target",
    ),
)
