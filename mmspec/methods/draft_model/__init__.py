"""Speculative decoding with a draft model (2211.17192)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "draft_model",
        "drafts with a smaller model of the same tokenizer, or of the same continuous tokens",
        "2211.17192",
        drafter="mmspec.methods.draft_model.drafter:DraftModelDrafter",
        make="mmspec.methods.draft_model.choice:draft_model",
        judged_by=("reflection", "shared_noise", "cspd"),
        needs="a smaller model with the target's tokenizer or image tokenizer",
        keeps="the target's next token; of a MAR, one cell per forward pass, each given all before it",
        tuned=(
            "draft_model:num_draft_tokens=3|5|8",
            "draft_model:length=cost",
        ),
    ),
)
