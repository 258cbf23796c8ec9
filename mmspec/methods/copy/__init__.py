"""Prompt look-up: continuations of the longest suffixes seen before."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "copy",
        "copies the continuations of the longest suffixes seen before",
        make="mmspec.methods.copy.drafter:copy",
        tuned=(
            "copy",
            "copy:num_draft_tokens=4|20",
        ),
    ),
)
