"""MaskGIT (2202.04200): the surest open cells in each forward pass."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "maskgit",
        "nothing: a model with queries for places (LPD) decides the surest of all open cells in each of "
        "`iterations` forwards",
        "2202.04200",
        make="mmspec.methods.maskgit.drafter:maskgit",
        rules={"maskgit": "mmspec.methods.maskgit.policy:MaskGIT"},
        trials=("maskgit",),
    ),
)
