"""AdaBlock-dLLM (2509.26432): masked blocks that end at the end of a line."""

from mmspec.plugins import Method

METHOD = Method(
    "adablock",
    "decides places as `threshold` does, in blocks that end at a probable token of `delimiters`",
    "2509.26432",
    drafter="mmspec_extras.methods.adablock.drafter:AdaptiveBlocksDrafter",
    make="mmspec_extras.methods.adablock.drafter:adablock",
    rules={"adablock": "mmspec_extras.methods.adablock.policy:AdaBlock"},
)
