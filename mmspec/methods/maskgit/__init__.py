"""MaskGIT (2202.04200): decides the surest open cells in each forward pass."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "maskgit",
        "decides the surest of all open image cells in each of `iterations` forward passes (LPD)",
        "2202.04200",
        drafter="mmspec.methods.maskgit.drafter:MaskGITDrafter",
        rule="maskgit",
        rules={"maskgit": "mmspec.methods.maskgit.policy:MaskGIT"},
        trials=("maskgit",),
    ),
)
