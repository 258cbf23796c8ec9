"""`mmspec accelerators`: the table of accelerators and acceptance rules, as docs/reference/accelerators.md shows it."""

from __future__ import annotations

from mmspec.cli.console import print_result
from mmspec.cli.options import AsJson
from mmspec.open_types import Json

__all__ = ["accelerators", "markdown_table"]


def accelerators(as_json: AsJson = False) -> None:
    """Print the accelerators and the acceptance rules, with what each promises, as Markdown.

    Example:
        mmspec accelerators
    """
    from mmspec.accelerators import options_of, promise_of
    from mmspec.plugins import METHODS

    rows: list[Json] = [
        {"name": name, "exactness": promise_of(method)[0], "summary": method.summary}
        | {"source": method.source, "needs": method.needs, "options": sorted(options_of(method))}
        for name, method in METHODS.items()
    ]
    print_result(rows, markdown_table(), as_json)


def markdown_table() -> str:
    """Render the table of accelerators and rules."""
    from mmspec.accelerators import promise_of
    from mmspec.core.draft import DraftKind
    from mmspec.plugins import METHODS, RULES

    lines = [
        "| accelerator | what drafts | exact / bound / lossy | needs | source |",
        "|---|---|---|---|---|",
    ]
    for name, method in METHODS.items():
        source = method.source
        if source != "-":
            source = f"[{source}](https://arxiv.org/abs/{source})"
        needs = method.needs or "nothing"
        lines.append(f"| `{name}` | {method.summary} | {stated(*promise_of(method))} | {needs} | {source} |")
    lines += ["", "| `acceptance=` | exact / bound / lossy | for drafts that are |", "|---|---|---|"]
    for name in RULES:
        rule = RULES[name]
        exactness = stated(rule.exactness, rule.bound) + (" at temperature 0" if rule.greedy_only else "")
        sound_for = [kind for kind in DraftKind if kind in getattr(rule, "sound_for", ())]
        kinds = ", ".join(kind.value.replace("_", " ") for kind in sound_for) or "places of a block"
        lines.append(f"| `{name}` | {exactness} | {kinds} |")
    return "\n".join(lines)


def stated(exactness: str, bound: str | None) -> str:
    """State a promise with its bound, or that it has none."""
    if bound is not None:
        return f"{exactness}: {bound}"
    return exactness if exactness == "exact" else f"{exactness}, no bound"
