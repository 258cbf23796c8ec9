"""Judge decoding: a trained judge accepts."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "judge",
        rules={"judge": "mmspec.methods.judge.rule:Judge"},
    ),
)
