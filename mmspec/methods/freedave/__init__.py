"""FreeDave (2510.00294): states of a masked block that are guessed to follow."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "freedave",
        "the target itself: a block-causal masked model (SDAR) scores the states of a block that are "
        "guessed to follow",
        "2510.00294",
        make="mmspec.methods.freedave.drafter:freedave",
        rules={"state_walk": "mmspec.places.state_walk:StateWalk"},
    ),
)
