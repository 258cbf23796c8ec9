"""Grouped speculative decoding (2508.07747) on a Jacobi window."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "gsd",
        "drafts as `sjd` does; accepts tokens by groups of similar probability, within `delta`",
        "2508.07747",
        drafter="mmspec.trees.jacobi:JacobiDrafter",
        rule="budget",
        settings={"relaxation": "groups"},
        rules={"grouped": "mmspec.methods.gsd.rule:Grouped"},
        trials=(
            "gsd:window=16|24|32",
            "sjd:acceptance=budget:relaxation=omega:window=16|24|32",
            "sjd:acceptance=grouped:window=16|32",
        ),
        tuned=("gsd:window=8|16|32|64",),
    ),
)
