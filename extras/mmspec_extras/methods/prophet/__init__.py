"""Prophet (2508.19982): all that is open once the gap of logits is large."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "prophet",
        "nothing: as `low_confidence`; all that is open, once the mean `gap` of logits is large",
        "2508.19982",
        policy="mmspec_extras.methods.prophet.policy:Prophet",
        rules={"prophet": "mmspec_extras.methods.prophet.policy:Prophet"},
    ),
)
