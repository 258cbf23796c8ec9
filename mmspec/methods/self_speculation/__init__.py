"""Masked blocks of the target itself draft (2607.05722)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "self_speculation",
        "the target itself: a model that was trained for both fills masked blocks behind every "
        "candidate, and judges them token by token",
        "2607.05722",
        make="mmspec.methods.self_speculation.drafter:self_speculation",
    ),
)
