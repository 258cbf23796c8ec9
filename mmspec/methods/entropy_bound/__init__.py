"""EB-Sampler (2505.24857): decides the masked places of lowest entropy together."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "entropy_bound",
        "decides the masked places of lowest entropy, up to a total of `entropy_bound` nats",
        "2505.24857",
        drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
        rule="entropy_bound",
        rules={"entropy_bound": "mmspec.methods.entropy_bound.policy:EntropyBound"},
    ),
)
