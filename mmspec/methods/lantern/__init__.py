"""LANTERN (2410.03355): relaxed acceptance among neighbours in the codebook."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "lantern",
        "as `sjd`; spends delta on tokens whose neighbours in the codebook are likely, after LANTERN "
        "(published rule: `acceptance=lantern`)",
        "2410.03355",
        make="mmspec.methods.lantern.rule:lantern",
        rules={
            "lantern": "mmspec.methods.lantern.rule:Lantern",
            "lantern++": "mmspec.methods.lantern.rule:LanternPlusPlus",
        },
    ),
)
