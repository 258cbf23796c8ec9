"""EOSER (2509.23924): end tokens come late."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "end_weight",
        "nothing: as `low_confidence`; end tokens come late, by `end_weight` (EOSER)",
        "2509.23924",
        policy="mmspec_extras.methods.end_weight.policy:EndWeight",
        rules={"end_weight": "mmspec_extras.methods.end_weight.policy:EndWeight"},
    ),
)
