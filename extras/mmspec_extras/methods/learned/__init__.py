"""Learn2PD (2509.25188): a trained filter says which places are final."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "learned",
        "nothing: as `low_confidence`; all places that a trained `filter` is sure of (Learn2PD)",
        "2509.25188",
        policy="mmspec_extras.methods.learned.policy:Learned",
        rules={"learned": "mmspec_extras.methods.learned.policy:Learned"},
    ),
)
