"""Typical acceptance (Medusa, 2401.10774)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "typical",
        rules={"typical": "mmspec.methods.typical.rule:Typical"},
    ),
)
