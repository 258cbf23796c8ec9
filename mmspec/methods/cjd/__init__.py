"""Corrected Jacobi decoding: a trained head corrects the window."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "cjd",
        "as `sjd`, where a trained head corrects what the target said of the next places",
        head=Head(
            model="mmspec.methods.cjd.head:CorrectorHead",
            drafter="mmspec.methods.cjd.drafter:CorrectedDrafter",
            loss="mmspec.methods.cjd.loss:CorrectorLoss",
            of_images=True,
        ),
        needs="a head that was trained for the target",
    ),
)
