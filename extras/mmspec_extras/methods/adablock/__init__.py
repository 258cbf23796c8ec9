"""AdaBlock-dLLM (2509.26432): blocks that end where a line does."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "adablock",
        "nothing: as `threshold`, in blocks that end behind a sure token of `delimiters`",
        "2509.26432",
        make="mmspec_extras.methods.adablock.drafter:adablock",
        rules={"adablock": "mmspec_extras.methods.adablock.policy:AdaBlock"},
    ),
)
