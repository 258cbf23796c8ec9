"""Early exit (2404.16710, 2504.05598): the target's own first layers draft."""

from mmspec.plugins import Method

METHOD = Method(
    "early_exit",
    "drafts with the first `layers` layers of the target and its LM head, on its keys and values",
    "2504.05598",
    drafter="mmspec_extras.methods.early_exit.drafter:EarlyExitDrafter",
)
