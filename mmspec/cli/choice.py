"""Accelerators as the command line writes them: `copy`, or `draft_model:num_draft_tokens=3`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmspec.errors import InputError
from mmspec.registry import parse_options

if TYPE_CHECKING:
    from mmspec.plugins import Method

__all__ = ["AcceleratorChoice", "parse_choice", "parse_choices"]


@dataclass(frozen=True)
class AcceleratorChoice:
    """An accelerator with its options.

    Attributes:
        label: as the user wrote it.
        name: of the method, known to exist; or "auto".
        options: of its drafter and rule.
    """

    label: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> Method | None:
        """The method of that name; None for "auto", which is one that `mmspec tune` has found."""
        from mmspec.accelerators.tuned import AUTO
        from mmspec.plugins import METHODS

        return None if self.name == AUTO else METHODS[self.name]


def parse_choice(text: str) -> AcceleratorChoice:
    """Read `name[:option=value]...`, as of `parse_options`."""
    choice = AcceleratorChoice(text.strip(), *parse_options("accelerator", text))
    _ = choice.method  # a typo should not cost a load
    return choice


def parse_choices(text: str) -> list[AcceleratorChoice]:
    """Read a list separated by commas; repeated entries count once."""
    written = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not written:
        raise InputError("accelerators", text, "names separated by commas, such as none,copy")
    return [parse_choice(part) for part in written]
