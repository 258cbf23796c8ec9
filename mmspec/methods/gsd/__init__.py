"""Grouped speculative decoding (2508.07747) on a Jacobi window."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "gsd",
        "as `sjd`; spends delta on groups of tokens of like probability, after GSD (published rule: "
        "`acceptance=grouped`)",
        "2508.07747",
        make="mmspec.methods.gsd.rule:gsd",
        rules={"grouped": "mmspec.methods.gsd.rule:Grouped"},
    ),
)
