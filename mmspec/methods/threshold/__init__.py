"""Fast-dLLM (2505.22618): decides all masked places above a confidence threshold."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "threshold",
        "decides all masked places whose token is at least `threshold` probable",
        "2505.22618",
        drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
        rule="threshold",
        rules={"threshold": "mmspec.methods.threshold.policy:Threshold"},
    ),
)
