"""Top-beta acceptance (2205.10350): accepts candidates among the likeliest tokens."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "top_beta",
        rules={"top_beta": "mmspec.methods.top_beta.rule:TopBeta"},
    ),
)
