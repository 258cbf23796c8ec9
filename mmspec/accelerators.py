"""Named presets: drafter x acceptance rule. Refuses pairings whose promise would not hold.

Adding a method adds one line here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from mmspec.acceptance import ACCEPTANCE_RULES
from mmspec.decoding.draft import DraftKind
from mmspec.decoding.interfaces import AcceptanceRule, Drafter, Target
from mmspec.decoding.sampling import Sampler, is_integer
from mmspec.drafters import DRAFTERS
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.registry import did_you_mean


@dataclass(frozen=True)
class Preset:
    """A line of the table of accelerators.

    Attributes:
        drafter, acceptance: names in the registries; the rule is a default that callers may replace.
        summary: what it does, in a sentence.
        source: the paper.
        needs_draft_model: True if it needs `drafter=`, the folder or id of a draft model.
    """

    drafter: str
    acceptance: str
    summary: str
    source: str
    needs_draft_model: bool = False

    @property
    def exactness(self) -> str:
        """What the default rule promises: "exact" or "lossy"."""
        return ACCEPTANCE_RULES[self.acceptance].exactness


ACCELERATORS: dict[str, Preset] = {
    "none": Preset("none", "sample_and_match", "plain decoding through the same loop", "-"),
    "copy": Preset(
        "copy", "sample_and_match", "copies the continuation of the longest suffix seen before", "2411.10666"
    ),
    "draft_model": Preset(
        "draft_model", "sample_and_match", "a smaller model of the same tokenizer drafts", "2211.17192", True
    ),
}


@dataclass(frozen=True)
class Accelerator:
    """A drafter with a rule that is sound for it.

    Raises:
        InputError: the rule is not sound for what the drafter proposes.
    """

    name: str
    drafter: Drafter
    rule: AcceptanceRule

    def __post_init__(self) -> None:
        if not is_sound(type(self.rule), self.drafter):
            sound = sorted(
                rule for rule in ACCEPTANCE_RULES if is_sound(ACCEPTANCE_RULES[rule], self.drafter)
            )
            shape = "trees" if self.drafter.branches else "chains"
            raise InputError(
                "acceptance",
                type(self.rule).__name__,
                f"it is not sound for {self.drafter.kind.value} {shape} and would bias the output; "
                f"for {self.name} with these options use one of: {', '.join(sound)}",
            )

    @property
    def exactness(self) -> str:
        return self.rule.promise

    def fit(self, target: Target[Any]) -> Accelerator:
        """This accelerator for that target.

        Raises:
            InputError: the drafter or the rule does not fit the target.
        """
        self.drafter.check(target)
        return replace(self, rule=self.rule.fit(target))

    def check(self, sampler: Sampler) -> None:
        """Raise InputError if the rule's promise does not hold for this way of sampling."""
        if self.rule.greedy_only and not sampler.greedy:
            raise InputError(
                "temperature",
                sampler.temperature,
                "acceptance='greedy' holds at temperature 0 only; use sample_and_match",
            )


def is_sound(rule: type[AcceptanceRule], drafter: Drafter) -> bool:
    """True if the rule's promise holds for what the drafter proposes."""
    return drafter.kind in rule.sound_for and not (rule.chains_only and drafter.branches)


def list_accelerators() -> list[str]:
    """Names that `accelerator=` takes."""
    return list(ACCELERATORS)


def find_preset(name: object) -> Preset:
    """The preset of that name.

    Raises:
        InputError: no such name; the message holds the nearest one.
    """
    if not isinstance(name, str) or name not in ACCELERATORS:
        raise InputError("accelerator", name, did_you_mean(name, ACCELERATORS))
    return ACCELERATORS[name]


def build_accelerator(name: str, *, acceptance: str | None = None, **options: object) -> Accelerator:
    """Make an accelerator from its name and the options of its drafter and rule.

    Raises:
        InputError: unknown name, unsound pairing, or a value outside its range.
        UnknownArgumentError: an option that neither drafter nor rule has.
    """
    preset = find_preset(name)
    drafter_class = DRAFTERS[preset.drafter]
    rule_class = ACCEPTANCE_RULES[preset.acceptance if acceptance is None else acceptance]
    for_drafter, for_rule = keywords(drafter_class), keywords(rule_class)
    for option in options:
        if option not in for_drafter | for_rule:
            allowed = did_you_mean(option, sorted(for_drafter | for_rule | {"acceptance"}))
            raise UnknownArgumentError(f"option of accelerator {name!r}", option, allowed)
    if is_integer(drafted := options.get("num_draft_tokens")) and drafted == 0:  # no draft: plain decoding
        drafter_class, for_drafter = DRAFTERS["none"], set()
    drafter = drafter_class(**{key: value for key, value in options.items() if key in for_drafter})
    rule = rule_class(**{key: value for key, value in options.items() if key in for_rule})
    return Accelerator(name, drafter, rule)


def keywords(plugin: type) -> set[str]:
    """Names of the constructor's arguments."""
    return {
        name
        for name, item in inspect.signature(plugin).parameters.items()
        if item.kind is item.POSITIONAL_OR_KEYWORD
    }


def markdown_table() -> str:
    """The README's table of accelerators."""
    lines = [
        "| accelerator | what drafts | exact / bound / lossy | needs | source |",
        "|---|---|---|---|---|",
    ]
    for name, preset in ACCELERATORS.items():
        needs = "a draft model" if preset.needs_draft_model else "nothing"
        rule = ACCEPTANCE_RULES[preset.acceptance]
        exactness = rule.exactness if rule.bound is None else f"{rule.exactness}: TV at most {rule.bound}"
        source = (
            preset.source
            if preset.source == "-"
            else f"[{preset.source}](https://arxiv.org/abs/{preset.source})"
        )
        lines.append(f"| `{name}` | {preset.summary} | {exactness} | {needs} | {source} |")
    lines += ["", "| `acceptance=` | exact / bound / lossy | for drafts that are |", "|---|---|---|"]
    for name in ACCEPTANCE_RULES:
        rule = ACCEPTANCE_RULES[name]
        exactness = rule.exactness + (" at temperature 0" if rule.greedy_only else "")
        exactness += f": TV at most {rule.bound}" if rule.bound else ""
        kinds = ", ".join(kind.value.replace("_", " ") for kind in DraftKind if kind in rule.sound_for)
        lines.append(f"| `{name}` | {exactness} | {kinds} |")
    return "\n".join(lines)
