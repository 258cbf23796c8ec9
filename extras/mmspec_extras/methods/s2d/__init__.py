"""S2D (2407.01955): several exits of one draft, trained together; each token uses the first sure one."""

from mmspec.plugins import Head, Method

METHOD = Method(
    "s2d",
    "drafts with trained exits of the target; each token uses the first exit that is sure of it",
    "2407.01955",
    drafter="mmspec_extras.methods.s2d.drafter:SortedExitsDrafter",
    head=Head(
        model="mmspec_extras.methods.s2d.head:SortedExits",
        loss="mmspec_extras.methods.s2d.loss:SortedExitsLoss",
    ),
    needs="exits that were trained for the target",
)
