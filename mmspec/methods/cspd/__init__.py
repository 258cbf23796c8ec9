"""Continuous speculative decoding of a MAR (2411.11925)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "cspd",
        "drafts image cells one by one with a smaller MAR, verified at their last denoising step",
        "2411.11925",
        drafter="mmspec.families.mar.cells:CellModelDrafter",
        make="mmspec.methods.cspd.drafter:cspd",
        rules={"cspd": "mmspec.vectors.rules:CSpD"},
        judged_by=("reflection", "shared_noise", "cspd"),
        needs="a smaller MAR of the same image tokenizer",
        keeps="one cell per forward pass, each given all before it",
    ),
)
