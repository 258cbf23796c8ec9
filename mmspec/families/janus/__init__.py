"""Janus and Janus-Pro."""

from mmspec.plugins import Family

FAMILIES = (
    Family(
        "janus",
        "mmspec.families.janus.target:JanusTarget",
        draws="tokens",
        generate="mmspec.families.janus.generation:generate_keywords",
    ),
)
