"""What pipelines return."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmspec.decoding.stats import DecodingStats


@dataclass
class TextOutput:
    """Generated text.

    Attributes:
        text: one string per prompt, without the prompt.
        tokens: the output token ids of each prompt, end token included.
        finish_reasons: "eos", "length", "stop", "interrupted" or "error" for each prompt.
        stats: what happened.
        drafted: for each output token of each prompt, whether it came from the draft.
    """

    text: list[str]
    tokens: list[list[int]]
    stats: DecodingStats
    finish_reasons: list[str] = field(default_factory=list)
    drafted: list[list[bool]] = field(default_factory=list)

    def __str__(self) -> str:
        first = " ".join(self.text[0].split()) if self.text else ""
        more = f" (+{len(self.text) - 1} more)" if len(self.text) > 1 else ""
        return f"{first}{more} [{self.stats}]"
