"""Learn2PD (2509.25188): a trained filter predicts which places are final."""

from mmspec.plugins import Method

METHOD = Method(
    "learned",
    "decides all masked places that a trained `filter` predicts to be final (Learn2PD)",
    "2509.25188",
    drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
    rule="learned",
    rules={"learned": "mmspec_extras.methods.learned.policy:Learned"},
)
