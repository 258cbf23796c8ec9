"""Chimera (2402.15758): a trigram encoder and one layer of full context before the heads."""

from mmspec.plugins import Head, Method

METHOD = Method(
    "chimera",
    "predicts with a head per level, which reads the last three tokens through a layer of full context",
    "2402.15758",
    drafter="mmspec_extras.methods.chimera.drafter:ChimeraDrafter",
    head=Head(
        model="mmspec_extras.methods.chimera.head:ChimeraHead",
        loss="mmspec_extras.methods.chimera.loss:ChimeraLoss",
    ),
    needs="a head that was trained for the target",
)
