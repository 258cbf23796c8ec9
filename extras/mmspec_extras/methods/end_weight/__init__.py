"""EOSER (2509.23924): delays end tokens."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "end_weight",
        "decides places as `low_confidence` does; `end_weight` delays end tokens (EOSER)",
        "2509.23924",
        policy="mmspec_extras.methods.end_weight.policy:EndWeight",
        rules={"end_weight": "mmspec_extras.methods.end_weight.policy:EndWeight"},
    ),
)
