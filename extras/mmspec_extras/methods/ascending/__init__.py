"""ASS (2509.23924): twice as many places in every forward pass."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "ascending",
        "nothing: as `low_confidence`; 1, 2, 4, ... places, in log2(n) forwards (ASS)",
        "2509.23924",
        policy="mmspec_extras.methods.ascending.policy:Ascending",
        rules={"ascending": "mmspec_extras.methods.ascending.policy:Ascending"},
    ),
)
