"""ZipAR (2412.04062): rows of an image decoded as a staircase."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "zipar",
        "nothing: rows of an image run as a staircase, `zipar_window` cells apart",
        "2412.04062",
        make="mmspec.methods.zipar.drafter:zipar",
        trials=(
            "zipar:window=1|4|8",
            "zipar:adaptive=true",
        ),
    ),
)
