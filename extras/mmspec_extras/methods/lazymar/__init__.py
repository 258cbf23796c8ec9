"""MAR's decoding with cached features (LazyMAR, 2503.12450)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "lazymar",
        "nothing: as `masked`, where most forwards compute some tokens and reuse what the others had",
        "2503.12450",
        make="mmspec_extras.methods.lazymar.drafter:lazymar",
    ),
)
