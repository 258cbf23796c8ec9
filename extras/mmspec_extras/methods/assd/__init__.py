"""Any-subset speculative decoding (2504.20456)."""

from mmspec.plugins import Method

METHOD = Method(
    "assd",
    "drafts the next gaps of a text with the target itself (XLNet), each independent of the others",
    "2504.20456",
    drafter="mmspec_extras.methods.assd.drafter:AnySubsetDrafter",
)
