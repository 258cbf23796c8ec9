"""BlockVid (2511.22973): blocks of a clip see only the first block and the most recent ones."""

from mmspec.plugins import Method

METHOD = Method(
    "sparse_context",
    "decodes clips (NBP) plainly; a block sees only the first and the last `context_blocks` blocks",
    "2511.22973",
    drafter="mmspec_extras.methods.sparse_context.drafter:RecentBlocksDrafter",
)
