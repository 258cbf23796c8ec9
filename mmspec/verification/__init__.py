"""Parts that acceptance rules share: residuals, the walk down a tree, relaxed masses."""
