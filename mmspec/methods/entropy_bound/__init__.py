"""EB-Sampler (2505.24857): places of low entropy."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "entropy_bound",
        "nothing: as `low_confidence`; places of low entropy, up to `entropy_bound` nats",
        "2505.24857",
        policy="mmspec.methods.entropy_bound.policy:EntropyBound",
        rules={"entropy_bound": "mmspec.methods.entropy_bound.policy:EntropyBound"},
    ),
)
