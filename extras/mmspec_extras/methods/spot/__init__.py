"""SPOT (2610.22543): `freedave` that guesses the next places by a network."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "spot",
        "as `freedave`; a trained `head` guesses in which order places are decided",
        "2610.22543",
        make="mmspec_extras.methods.spot.drafter:spot",
    ),
)
