"""Continuous speculative decoding of a MAR (2411.11925)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "cspd",
        "a smaller MAR draws cells one after another; the last step of each is judged, exactly unless "
        "the switches of the released code are set",
        "2411.11925",
        make="mmspec.methods.cspd.drafter:cspd",
        rules={"cspd": "mmspec.vectors.rules:CSpD"},
        judged_by=("reflection", "shared_noise", "cspd"),
        needs="a smaller MAR of the same image tokenizer",
        keeps="one cell a forward, each given all before it",
    ),
)
