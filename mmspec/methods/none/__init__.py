"""Plain decoding through the same loop, the baseline of every benchmark."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "none",
        "decodes plainly, through the same loop without drafts",
        drafter="mmspec.core.plain:NoDrafter",
        tuned=("none",),
    ),
)
