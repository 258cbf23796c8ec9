"""Left-to-right order of masked places (SDAR, 2510.06303)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "sequential",
        "decides the leftmost `places_per_step` masked places in each forward pass",
        "2510.06303",
        drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
        rule="sequential",
        rules={"sequential": "mmspec.places.sequential:Sequential"},
    ),
)
