"""Improving MCSD (2409.10644): candidates of level 1 from the target, and drafts that stop early."""

from mmspec.plugins import Method

METHOD = Method(
    "target_start",
    "drafts a tree with a smaller model, level 1 also from the target's own predictions",
    "2409.10644",
    drafter="mmspec_extras.methods.target_start.drafter:TargetStartDrafter",
    needs="a smaller model with the target's tokenizer",
)
