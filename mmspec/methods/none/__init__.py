"""Plain decoding through the same loop, the baseline of every benchmark."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "none",
        "plain decoding through the same loop",
        make="mmspec.methods.none.drafter:none",
        tuned=("none",),
    ),
)
