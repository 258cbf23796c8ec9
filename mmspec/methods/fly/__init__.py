"""FLy (2511.22972): accepts an ambiguous token if the draft goes on as the target would. Lossy by design."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "fly",
        rules={"fly": "mmspec.methods.fly.rule:FLy"},
    ),
)
