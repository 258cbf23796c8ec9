"""Judge decoding: a trained judge accepts."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "judge",
        rules={"judge": "mmspec_extras.methods.judge.rule:Judge"},
    ),
)
