"""MAR's own decoding (2406.11838): several cells in a forward pass."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "masked",
        "nothing: a masked model (MAR) decides several cells in each of `iterations` forwards, in "
        "`order` random or checkerboard",
        "2406.11838",
        make="mmspec.methods.masked.drafter:masked",
    ),
)
