"""LLaDA's order (2502.09992): decides the surest masked places first."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "low_confidence",
        "decides the surest masked places in each forward pass; exact with one place, lossy with more",
        "2502.09992",
        drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
        rule="most_confident",
        rules={"most_confident": "mmspec.places.confidence:LowConfidence"},
        former_rules={"low_confidence": "most_confident"},
        tuned=("low_confidence",),
    ),
)
