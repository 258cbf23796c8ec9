"""Block verification (2403.10444)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "block",
        rules={"block": "mmspec.methods.block.rule:BlockVerification"},
    ),
)
