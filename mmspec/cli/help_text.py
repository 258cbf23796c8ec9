"""Help of a command: lines of options fit into 80 columns, and examples keep their lines."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

__all__ = ["Command"]

EXAMPLE = "Example:\n"


class Command(TyperCommand):
    """A command whose docstring is prose, then "Example:" with one command a line."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence, whatever its length."""
        return super().get_short_help_str(limit=len(self.help or "") + limit)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the prose, wrapped, and the examples, as they are."""
        said, _, examples = (self.help or "").partition(EXAMPLE)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(said.strip())
        if examples:
            with formatter.section(EXAMPLE.strip(":\n")):
                for line in examples.splitlines():
                    formatter.write(f"  {line.strip()}\n")
