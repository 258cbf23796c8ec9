"""Acceptance of suffixes."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "suffix",
        rules={"suffix": "mmspec.methods.suffix.rule:Suffix"},
    ),
)
