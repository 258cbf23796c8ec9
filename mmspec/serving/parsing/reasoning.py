"""Incremental parser of reasoning: splits the text of an answer into what the model thinks and its answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mmspec.serving.parsing.tool_calls import overlap

__all__ = ["REASONING_FORMATS", "ReasoningFormat", "ReasoningParser", "find_reasoning_format"]


@dataclass(frozen=True)
class ReasoningFormat:
    """Texts before and after the reasoning at the beginning of an answer."""

    start: str
    end: str

    def is_open(self, text: str) -> bool:
        """Whether a text ends within reasoning, so that what continues it begins there."""
        return text.rfind(self.start) > text.rfind(self.end)


THINK = ReasoningFormat("<think>", "</think>")

#: Formats by name, with the names of vLLM.
REASONING_FORMATS = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def find_reasoning_format(template: str, tokens: Collection[str]) -> str | None:
    """Return the name of the format in a chat template, or among a tokenizer's added tokens."""
    for text in (template, "\n".join(tokens)):
        if "</think>" in text:
            return "qwen3"
        if "[/THINK]" in text:
            return "mistral"
    return None


class ReasoningParser:
    """Splits a text that grows into reasoning and the rest. Blanks around the reasoning belong to neither.

    Args:
        form: format of the reasoning.
        is_open: whether the prompt contains the start of the reasoning. Otherwise the text has to begin with
            it; a text that does not has no reasoning.
    """

    def __init__(self, form: ReasoningFormat, is_open: bool) -> None:
        self._form = form
        self._state = "blank" if is_open else "start"
        self._held = ""

    def add(self, text: str) -> tuple[str, str]:
        """Add text; return the reasoning and the rest that it completes."""
        self._held += text
        reasoning = ""
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(self._form.start):
                self._held, self._state = begun.removeprefix(self._form.start), "blank"
            elif not self._form.start.startswith(begun):
                self._state = "rest"
        if self._state == "blank":  # before the reasoning
            self._held = self._held.lstrip()
            self._state = "reasoning" if self._held else "blank"
        if self._state == "reasoning":
            thought, end, rest = self._held.partition(self._form.end)
            if end:
                reasoning, self._held, self._state = thought.rstrip(), rest, "after"
            else:
                kept = overlap(thought, self._form.end)
                reasoning = thought[: len(thought) - kept].rstrip()
                self._held = thought[len(reasoning) :]
        if self._state == "after":  # before the rest
            self._held = self._held.lstrip()
            self._state = "rest" if self._held else "after"
        if self._state != "rest":
            return reasoning, ""
        rest, self._held = self._held, ""
        return reasoning, rest

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the rest at the end of the text."""
        held, self._held = self._held, ""
        return ("", held) if self._state == "start" else (held.rstrip(), "")
