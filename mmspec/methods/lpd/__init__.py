"""LPD (2507.01957): models that decide groups of image cells by learned queries for places."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "lpd",
        "decides groups of image cells in a chosen order, for models with queries for places (LPD)",
        "2507.01957",
        drafter="mmspec.families.parallel_images.cells:OrderedCellsDrafter",
        make="mmspec.methods.lpd.states:lpd",
        trials=("lpd",),
    ),
)
