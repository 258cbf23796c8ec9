"""Hydra (2402.05109): heads that know the tokens before theirs."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "hydra",
        "as `medusa`, by heads that also read the tokens that the heads before them chose",
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
