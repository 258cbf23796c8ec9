"""Falcon (2412.12639): an LSTM and a layer whose blocks see themselves draft a block in a forward pass."""

from mmspec.plugins import Head, Method

METHOD = Method(
    "falcon",
    "drafts blocks of tokens as a tree with an LSTM and a layer that attends within blocks",
    "2412.12639",
    drafter="mmspec_extras.methods.falcon.drafter:FalconDrafter",
    head=Head(
        model="mmspec_extras.methods.falcon.head:FalconHead",
        loss="mmspec_extras.methods.falcon.loss:FalconLoss",
    ),
    needs="a head that was trained for the target",
)
