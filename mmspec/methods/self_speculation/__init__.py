"""Self-speculation (2607.05722): the target's own masked blocks draft its next tokens."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "self_speculation",
        "fills masked blocks after every candidate, if the target was trained to fill masks",
        "2607.05722",
        drafter="mmspec.methods.self_speculation.drafter:SelfSpeculationDrafter",
    ),
)
