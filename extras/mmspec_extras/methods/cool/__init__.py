"""COOL-SD (2601.09212): annealed relaxation on a Jacobi window."""

from mmspec.plugins import Method

METHOD = Method(
    "cool",
    "drafts as `sjd` does; accepts more at place 0 of the window, and at others if `nu` is below 0.69",
    "2601.09212",
    drafter="mmspec.trees.jacobi:JacobiDrafter",
    rule="cool",
    rules={"cool": "mmspec_extras.methods.cool.rule:Cool"},
    trials=("cool:window=16|32",),
)
