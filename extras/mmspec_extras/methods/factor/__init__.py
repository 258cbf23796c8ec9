"""Fast-dLLM (2505.22618): decides as many places as are jointly probable enough."""

from mmspec.plugins import Method

METHOD = Method(
    "factor",
    "decides the surest masked places, as many as `factor` allows at their confidence",
    "2505.22618",
    drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
    rule="factor",
    rules={"factor": "mmspec_extras.methods.factor.policy:Factor"},
)
