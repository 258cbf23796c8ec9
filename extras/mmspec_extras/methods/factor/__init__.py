"""Fast-dLLM (2505.22618): as many places as are sure together."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "factor",
        "nothing: as `low_confidence`; as many places as are sure together, by `factor`",
        "2505.22618",
        policy="mmspec_extras.methods.factor.policy:Factor",
        rules={"factor": "mmspec_extras.methods.factor.policy:Factor"},
    ),
)
