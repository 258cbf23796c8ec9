"""ViSkip (2603.14989): no drafts where the target attends to its images."""

from mmspec.plugins import Method

METHOD = Method(
    "viskip",
    "drafts with a smaller model, and not where the target attends to its images",
    "2603.14989",
    drafter="mmspec_extras.methods.viskip.drafter:VisualSkipDrafter",
    needs="a smaller model with the target's tokenizer",
)
