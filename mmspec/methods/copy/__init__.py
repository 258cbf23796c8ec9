"""Prompt look-up: drafts what followed the same words earlier in the text."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "copy",
        "copies what followed the same words earlier in the text",
        make="mmspec.methods.copy.drafter:copy",
        tuned=(
            "copy",
            "copy:num_draft_tokens=4|20",
        ),
    ),
)
