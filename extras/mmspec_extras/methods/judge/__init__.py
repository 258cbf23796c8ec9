"""Judge Decoding (2501.19309): a trained judge accepts harmless draft tokens."""

from mmspec.plugins import Method

METHOD = Method("judge", rules={"judge": "mmspec_extras.methods.judge.rule:Judge"})
