"""Fast-dLLM (2505.22618): all places that are sure enough."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "threshold",
        "nothing: as `low_confidence`; all places at least `threshold` sure",
        "2505.22618",
        policy="mmspec.methods.threshold.policy:Threshold",
        rules={"threshold": "mmspec.methods.threshold.policy:Threshold"},
    ),
)
