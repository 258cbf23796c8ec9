"""Hidden Transfer (2404.12022): pseudo hidden states after every candidate, from a layer of the target on."""

from mmspec.plugins import Head, Method

METHOD = Method(
    "hidden_transfer",
    "predicts the next tokens with pseudo hidden states that enter an inner layer of the target",
    "2404.12022",
    drafter="mmspec_extras.methods.hidden_transfer.drafter:HiddenTransferDrafter",
    head=Head(
        model="mmspec_extras.methods.hidden_transfer.head:HiddenTransfer",
        loss="mmspec_extras.methods.hidden_transfer.loss:HiddenTransferLoss",
    ),
    needs="maps of hidden states that were trained for the target",
)
