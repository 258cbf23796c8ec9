"""SPOT (2610.22543): `freedave` with a network that predicts the next places."""

from mmspec.plugins import Method

METHOD = Method(
    "spot",
    "drafts as `freedave` does; a trained `head` predicts the order in which places are decided",
    "2610.22543",
    drafter="mmspec_extras.methods.spot.drafter:OrderedStatesDrafter",
    rule="state_walk",
)
