"""Acceptance among the likeliest tokens."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "top_beta",
        rules={"top_beta": "mmspec.methods.top_beta.rule:TopBeta"},
    ),
)
