"""Prophet (2508.19982): decides all open places once the gap of logits is large."""

from mmspec.plugins import Method

METHOD = Method(
    "prophet",
    "decides places as `low_confidence` does, and all open ones once the mean `gap` of logits is large",
    "2508.19982",
    drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
    rule="prophet",
    rules={"prophet": "mmspec_extras.methods.prophet.policy:Prophet"},
)
