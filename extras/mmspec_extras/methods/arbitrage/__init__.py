"""Arbitrage (2512.05033): each step of a text is written by a smaller model or by the target."""

from mmspec.plugins import Method

METHOD = Method(
    "arbitrage",
    "a smaller model writes whole steps; the target writes those that it would write much better",
    "2512.05033",
    drafter="mmspec_extras.methods.arbitrage.drafter:StepDrafter",
    rule="step_margin",
    rules={"step_margin": "mmspec_extras.methods.arbitrage.rule:StepMargin"},
    needs="a smaller model with the target's tokenizer",
)
