"""Any-subset speculative decoding (2504.20456)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "assd",
        "the target itself: an any-subset density model (XLNet) draws the next gaps of a text, which do "
        "not know of each other",
        "2504.20456",
        make="mmspec_extras.methods.assd.drafter:assd",
    ),
)
