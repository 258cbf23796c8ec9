"""LANTERN (2410.03355): relaxed acceptance among neighbours in the codebook."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "lantern",
        "drafts as `sjd` does; accepts tokens whose codebook neighbours are likely, within `delta`",
        "2410.03355",
        drafter="mmspec.trees.jacobi:JacobiDrafter",
        rule="budget",
        rules={
            "lantern": "mmspec.methods.lantern.rule:Lantern",
            "lantern++": "mmspec.methods.lantern.rule:LanternPlusPlus",
        },
        trials=(
            "lantern:delta=0.05:window=16|24|32",
            "lantern:window=16|24|32",
            "sjd:acceptance=lantern:window=16|32",
            "sjd:acceptance=lantern++:window=16|32",
        ),
        tuned=("lantern:window=8|16|32|64",),
    ),
)
