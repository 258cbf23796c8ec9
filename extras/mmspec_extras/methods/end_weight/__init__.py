"""EOSER (2509.23924): delays end tokens."""

from mmspec.plugins import Method

METHOD = Method(
    "end_weight",
    "decides places as `low_confidence` does; `end_weight` delays end tokens (EOSER)",
    "2509.23924",
    drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
    rule="end_weight",
    rules={"end_weight": "mmspec_extras.methods.end_weight.policy:EndWeight"},
)
