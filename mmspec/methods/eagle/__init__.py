"""EAGLE: a trained layer on the target's hidden states grows a tree of candidates.

EAGLE-1 (Li et al., 2401.15077) with static trees, EAGLE-2 (2406.16858) with dynamic ones, LANTERN
(2410.03355) for images. EAGLE-1 draws the candidates of its tree without replacement when it samples
(`sampling="without_replacement"`). By default mmspec takes the likeliest ones, for which `sample_and_match`
is exact.
"""

from mmspec.plugins import Head, Method, Variant

#: The fastest of nine trees for scenes-llamagen.
IMAGE_TREE = {"num_draft_tokens": 60, "depth": 3, "top_k": 40}
METHODS = (
    Method(
        "eagle",
        "grows a tree of drafts with a trained layer on the target's hidden states",
        "2406.16858",
        drafter="mmspec.heads.feature_session:GrownTreeDrafter",
        head=Head(
            model="mmspec.methods.eagle.head:EagleHead",
            loss="mmspec.methods.eagle.loss:EagleLoss",
            published="mmspec.methods.eagle.published:read_eagle",
            image_settings=IMAGE_TREE,
            shipped={
                "scenes-llava-eagle": (
                    "head that drafts for scenes-llava",
                    "mmspec train drafter --target assets/scenes-llava --method eagle",
                ),
                "scenes-llamagen-eagle": (
                    "head that drafts for scenes-llamagen",
                    "mmspec train drafter --target assets/scenes-llamagen --method eagle",
                ),
            },
            variants={  # other ways to read images: MSD (2505.14260), SpecVLM, ViSpec (2509.15235)
                "msd": Variant({"visual": "embedded"}),
                "specvlm": Variant({"compressor": "gate"}),
                "vispec": Variant(
                    {"visual": "embedded", "compressor": "vispec"}, "mmspec.methods.eagle.loss:ViSpecLoss"
                ),
            },
        ),
        needs="a head that was trained for the target",
        trials=(
            "eagle:num_draft_tokens=8|24",
            "eagle:acceptance=budget:num_draft_tokens=8|24",
            "eagle:acceptance=lantern:num_draft_tokens=8|24",
        ),
    ),
)
