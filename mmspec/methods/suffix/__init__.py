"""Suffix acceptance (SJD-SV, 2609.13245): verifies runs of draft tokens jointly."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "suffix",
        rules={"suffix": "mmspec.methods.suffix.rule:Suffix"},
    ),
)
