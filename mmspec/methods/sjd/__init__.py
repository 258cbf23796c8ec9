"""Speculative Jacobi decoding (2410.01699)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "sjd",
        "the target itself: it fills a window of places and redraws them round after round",
        "2410.01699",
        make="mmspec.methods.sjd.drafter:sjd",
    ),
)
