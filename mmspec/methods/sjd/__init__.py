"""Speculative Jacobi decoding (2410.01699)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "sjd",
        "fills a window of image tokens with drafts, and redraws them round after round",
        "2410.01699",
        drafter="mmspec.trees.jacobi:JacobiDrafter",
        trials=(
            "sjd:coupling=fresh:window=8|12|16|24|32",
            "sjd:coupling=gumbel:window=8|12|16|24|32",
            "sjd:coupling=exact:window=8|12|16|24|32",
            "sjd:window=8|12|16|24|32",
            "sjd:front=2x2|4x4x4:reach=3:window=16|32",
            "sjd:reuse=0.2:window=8|16|32",
            "sjd:acceptance=suffix:window=16|32",
        ),
        tuned=("sjd:window=8|16|32|64",),
    ),
)
