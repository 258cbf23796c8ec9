"""SSD (2606.20543): a trained head drafts new places from the row above."""

from mmspec.plugins import Head, Method

METHOD = Method(
    "ssd",
    "drafts as `sjd` does; a trained head drafts new places from the row above",
    "2606.20543",
    drafter="mmspec_extras.methods.ssd.drafter:VerticalDrafter",
    head=Head(
        model="mmspec_extras.methods.ssd.head:VerticalHead",
        loss="mmspec_extras.methods.ssd.loss:VerticalLoss",
        of_images=True,
    ),
    needs="a head that was trained for the target",
    trials=("ssd:window=16|24|32", "ssd:acceptance=budget:window=16|24|32"),
    tuned=("ssd:window=8|16|32|64",),
)
