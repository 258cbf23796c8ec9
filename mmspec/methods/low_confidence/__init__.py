"""LLaDA's order (2502.09992): the surest places first."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "low_confidence",
        "nothing: a masked language model (LLaDA, SDAR, Dream) decides `places_per_step` places in each "
        "forward, the surest first, block after block",
        "2502.09992",
        make="mmspec.methods.low_confidence.policy:low_confidence",
        rules={"low_confidence": "mmspec.places.confidence:LowConfidence"},
        tuned=("low_confidence",),
    ),
)
