"""Graph-structured drafts (2407.16207): equal nodes of a draft are computed once."""

from mmspec.plugins import Method

METHOD = Method(
    "graph_drafts",
    "drafts a graph with a smaller model: equal tokens of a level share what follows them",
    "2407.16207",
    drafter="mmspec_extras.methods.graph_drafts.drafter:GraphDrafter",
    needs="a smaller model with the target's tokenizer",
)
