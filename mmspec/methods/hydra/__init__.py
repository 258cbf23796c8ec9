"""Hydra (2402.05109): sequential heads, each of which reads the tokens of the heads before it."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "hydra",
        "predicts with heads as `medusa` does; each also reads the tokens of the heads before it",
        "2402.05109",
        head=Head(
            model="mmspec.methods.hydra.head:HydraHead",
            drafter="mmspec.methods.hydra.drafter:HydraDrafter",
            loss="mmspec.methods.hydra.loss:HydraLoss",
            published="mmspec.methods.hydra.published:read_hydra",
        ),
        needs="a head that was trained for the target",
    ),
)
