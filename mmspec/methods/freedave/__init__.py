"""FreeDave (2510.00294): drafts the next states of a masked block, and scores them in one forward pass."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "freedave",
        "drafts the next states of a masked block (SDAR), and scores them in one forward pass",
        "2510.00294",
        drafter="mmspec.methods.freedave.drafter:StatesDrafter",
        rule="state_walk",
        rules={"state_walk": "mmspec.places.state_walk:StateWalk"},
    ),
)
