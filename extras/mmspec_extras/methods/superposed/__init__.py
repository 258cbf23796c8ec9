"""Superposed decoding (2405.18400): several drafts from each forward pass of a draft model."""

from mmspec.plugins import Method

METHOD = Method(
    "superposed",
    "drafts several chains at once with a model that reads the weighted mean of their tokens",
    "2405.18400",
    drafter="mmspec_extras.methods.superposed.drafter:SuperposedDrafter",
    needs="a smaller model with the target's tokenizer",
)
