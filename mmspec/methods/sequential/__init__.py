"""The leftmost places of a masked block (SDAR, 2510.06303)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "sequential",
        "nothing: as `low_confidence`; the leftmost `places_per_step` places",
        "2510.06303",
        policy="mmspec.places.sequential:Sequential",
        rules={"sequential": "mmspec.places.sequential:Sequential"},
    ),
)
