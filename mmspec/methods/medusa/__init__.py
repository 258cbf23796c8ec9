"""Medusa (2401.10774): a head for each level of the tree."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "medusa",
        "predicts one token each with several heads on one hidden state of the target",
        "2401.10774",
        drafter="mmspec.methods.medusa.drafter:MedusaDrafter",
        head=Head(
            model="mmspec.methods.medusa.head:MedusaHead",
            loss="mmspec.methods.medusa.loss:MedusaLoss",
            published="mmspec.methods.medusa.published:read_medusa",
        ),
        needs="a head that was trained for the target",
        tuned=(
            "medusa",
            "medusa:length=cost",
        ),
    ),
)
