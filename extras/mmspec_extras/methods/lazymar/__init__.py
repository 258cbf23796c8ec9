"""LazyMAR (2503.12450): MAR's decoding with cached features."""

from mmspec.plugins import Method

METHOD = Method(
    "lazymar",
    "decides cells as `masked` does; most forward passes compute some tokens and reuse the others",
    "2503.12450",
    drafter="mmspec_extras.methods.lazymar.drafter:LazyCellDrafter",
)
