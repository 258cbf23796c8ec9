"""Block verification (2403.10444): verifies a chain of draft tokens jointly."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "block",
        rules={"block": "mmspec.methods.block.rule:BlockVerification"},
    ),
)
