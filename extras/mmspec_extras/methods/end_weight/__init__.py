"""EOSER (2509.23924): end tokens come late."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "end_weight",
        "nothing: as `low_confidence`; end tokens come late, by `end_weight` (EOSER)",
        "2509.23924",
        policy="mmspec.places.end_weight:EndWeight",
        rules={"end_weight": "mmspec.places.end_weight:EndWeight"},
    ),
)
