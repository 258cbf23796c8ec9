"""LPD (2507.01957): groups of cells, each asked for by learned queries."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "lpd",
        "nothing: a model with queries for places (LPD) decides groups of cells, in `order` proximity, "
        "raster, random, diagonal, regions, blocks (rows) or checkerboard",
        "2507.01957",
        make="mmspec.methods.lpd.states:lpd",
        trials=("lpd",),
    ),
)
