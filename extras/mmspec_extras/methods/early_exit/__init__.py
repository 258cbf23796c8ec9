"""The target's own first layers draft (2404.16710, 2504.05598)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "early_exit",
        "the target itself: its first `layers` layers and its LM head, over its own keys and values",
        "2504.05598",
        make="mmspec_extras.methods.early_exit.drafter:early_exit",
    ),
)
