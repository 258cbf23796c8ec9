"""Corrected Jacobi decoding: a trained head corrects the drafts of a Jacobi window."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "cjd",
        "drafts as `sjd` does; a trained head corrects the target's outdated predictions",
        drafter="mmspec.methods.cjd.drafter:CorrectedDrafter",
        head=Head(
            model="mmspec.methods.cjd.head:CorrectorHead",
            loss="mmspec.methods.cjd.loss:CorrectorLoss",
            of_images=True,
            shipped={
                "scenes-llamagen-cjd": (
                    "head for scenes-llamagen",
                    "mmspec train drafter --target assets/scenes-llamagen --method cjd",
                ),
                "scenes-llamagen-long-cjd": (
                    "head for scenes-llamagen-long",
                    "mmspec train drafter --target assets/scenes-llamagen-long --method cjd",
                ),
            },
        ),
        needs="a head that was trained for the target",
        trials=(
            "cjd:window=24|32:corrected=19:passes=2|3",
            "cjd:coupling=exact:window=16|24|32:corrected=15:passes=2",
            "cjd:acceptance=budget:relaxation=neighbours|omega:window=24|32:corrected=12:passes=1|2",
            "cjd:acceptance=lantern:window=24|32:corrected=12:passes=1|2",
        ),
        tuned=("cjd:window=8|16|32|64:passes=2|4",),
    ),
)
