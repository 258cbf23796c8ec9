"""Prompt look-up: drafts what followed the same words earlier in the text."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "copy",
        "copies what followed the same words earlier in the text",
        drafter="mmspec.methods.copy.drafter:CopyDrafter",
        beside="mmspec.methods.copy.beside_head:beside",
        tuned=(
            "copy",
            "copy:num_draft_tokens=4|20",
        ),
    ),
)
