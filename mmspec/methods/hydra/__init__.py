"""Hydra (2402.05109): sequential heads, each of which reads the tokens of the heads before it."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "hydra",
        "predicts with heads as `medusa` does; each also reads the tokens of the heads before it",
        "2402.05109",
        drafter="mmspec.methods.hydra.drafter:HydraDrafter",
        head=Head(
            model="mmspec.methods.hydra.head:HydraHead",
            loss="mmspec.methods.hydra.loss:HydraLoss",
            published="mmspec.methods.hydra.published:read_hydra",
        ),
        needs="a head that was trained for the target",
    ),
)
