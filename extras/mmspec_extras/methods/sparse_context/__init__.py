"""BlockVid (2511.22973): blocks of a clip see the most recent ones."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "sparse_context",
        "nothing: a model of clips (NBP) whose blocks see the first block and the `context_blocks` most "
        "recent ones",
        "2511.22973",
        make="mmspec_extras.methods.sparse_context.drafter:sparse_context",
    ),
)
