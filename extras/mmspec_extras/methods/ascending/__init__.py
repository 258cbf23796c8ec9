"""ASS (2509.23924): decides twice as many places in every forward pass."""

from mmspec.plugins import Method

METHOD = Method(
    "ascending",
    "decides the surest 1, 2, 4, ... of n masked places, in log2(n) forward passes (ASS)",
    "2509.23924",
    drafter="mmspec.families.masked_language.unmasking:UnmaskingDrafter",
    rule="ascending",
    rules={"ascending": "mmspec_extras.methods.ascending.policy:Ascending"},
)
