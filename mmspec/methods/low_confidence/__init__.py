"""LLaDA's order (2502.09992): decides the surest masked places first."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "low_confidence",
        "decides the surest `places_per_step` masked places in each forward pass, block by block",
        "2502.09992",
        drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
        rule="low_confidence",
        rules={"low_confidence": "mmspec.places.confidence:LowConfidence"},
        tuned=("low_confidence",),
    ),
)
