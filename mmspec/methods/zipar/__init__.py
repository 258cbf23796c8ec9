"""ZipAR (2412.04062): decodes rows of an image as a staircase."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "zipar",
        "decodes image rows side by side as a staircase, `zipar_window` cells apart",
        "2412.04062",
        drafter="mmspec.methods.zipar.drafter:StaircaseDrafter",
        trials=(
            "zipar:window=1|4|8",
            "zipar:adaptive=true",
        ),
    ),
)
