"""MAR's own decoding (2406.11838): several cells in a forward pass."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "masked",
        "decides several image cells in each of `iterations` forward passes of a masked model (MAR)",
        "2406.11838",
        drafter="mmspec.families.mar.cells:CellOrderDrafter",
        trials=(
            "masked:iterations=32",
            "masked:iterations=20",
            "masked:iterations=64:last_steps=5",
            "masked:iterations=20:order=checkerboard",
            "masked:iterations=20:order=checkerboard:last_steps=10",
        ),
    ),
)
