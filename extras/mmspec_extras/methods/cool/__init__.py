"""COOL-SD (2601.09212): annealed relaxation on a Jacobi window."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "cool",
        "as `sjd`; accepts more at the first place of the window, and with `nu` below 0.69 at later ones",
        "2601.09212",
        make="mmspec_extras.methods.cool.rule:cool",
        rules={"cool": "mmspec_extras.methods.cool.rule:Cool"},
        trials=("cool:window=16|32",),
    ),
)
