"""Named presets: drafter x acceptance rule. Refuses pairings whose promise would not hold.

Adding a method adds one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.acceptance import ACCEPTANCE_RULES
from mmspec.decoding.draft import DraftKind
from mmspec.decoding.interfaces import AcceptanceRule, Drafter, Request, Target
from mmspec.decoding.parallel import Schedule, decode_cells
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler, is_integer, require_number
from mmspec.decoding.sequences import Emission, Sequences
from mmspec.decoding.speculative import speculate
from mmspec.decoding_orders import SCHEDULES
from mmspec.drafters import DRAFTERS
from mmspec.drafting.length import CostModel, PacedDrafter
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.registry import did_you_mean

LENGTHS = ("fixed", "confidence", "cost")
DEFAULT_STOP = 0.3


@dataclass(frozen=True)
class Preset:
    """A line of the table of accelerators.

    Attributes:
        drafter, acceptance: names in the registries; the rule is a default that callers may replace.
        summary: what it does, in a sentence.
        source: the paper.
        needs_draft_model: True if it needs `drafter=`, the folder or id of a draft model.
        otherwise: the default rules, in this order, where options of the drafter change what it proposes and
            `acceptance` is not sound for that.
        schedule: the name of an order of cells, for images that are not decoded token after token.
        options: defaults of the preset, for whichever of drafter, rule and schedule has such an option.
    """

    drafter: str
    acceptance: str
    summary: str
    source: str
    needs_draft_model: bool = False
    otherwise: tuple[str, ...] = ()
    schedule: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def needs(self) -> str | None:
        """What `drafter=` has to be, in words; None where nothing is needed."""
        if not self.needs_draft_model:
            return None
        return (
            "a smaller model with the target's tokenizer"
            if self.drafter == "draft_model"
            else "a head that was trained for the target"
        )

    @property
    def exactness(self) -> str:
        """What the schedule or the default rule promises: "exact", "bounded" or "lossy"."""
        if self.schedule is not None:
            return SCHEDULES[self.schedule].exactness
        return ACCEPTANCE_RULES[self.acceptance].exactness


ACCELERATORS: dict[str, Preset] = {
    "none": Preset("none", "sample_and_match", "plain decoding through the same loop", "-"),
    "copy": Preset(
        "copy", "sample_and_match", "copies the continuation of the longest suffix seen before", "2411.10666"
    ),
    "draft_model": Preset(
        "draft_model", "sample_and_match", "a smaller model of the same tokenizer drafts", "2211.17192", True
    ),
    "eagle": Preset(
        "eagle",
        "sample_and_match",
        "a trained head grows a tree from the target's hidden states",
        "2406.16858",
        True,
    ),
    "eagle3": Preset(
        "eagle3",
        "sample_and_match",
        "as `eagle`, from hidden states of three depths and over a vocabulary of its own",
        "2503.01840",
        True,
    ),
    "flash": Preset(
        "flash",
        "sample_and_match",
        "a trained head reads compressed images and drafts a block of tokens in each pass, as a tree",
        "2505.12728",
        True,
    ),
    "medusa": Preset(
        "medusa",
        "sample_and_match",
        "trained heads on one hidden state of the target each draft a token of their own",
        "2401.10774",
        True,
    ),
    "hydra": Preset(
        "hydra",
        "sample_and_match",
        "as `medusa`, by heads that are told which tokens the heads before them chose",
        "2402.05109",
        True,
    ),
    "zipar": Preset(
        "none",
        "speculative_sampling",
        "nothing: rows of an image run as a staircase, `zipar_window` cells apart",
        "2412.04062",
        schedule="staircase",
    ),
    "sjd": Preset(
        "jacobi",
        "speculative_sampling",
        "the target itself: it fills a window of places and redraws them round after round",
        "2410.01699",
        otherwise=("recursive_rejection", "sample_and_match"),
    ),
    "gsd": Preset(
        "jacobi",
        "budget",
        "as `sjd`; spends delta on groups of tokens of like probability, after GSD "
        "(published rule: `acceptance=grouped`)",
        "2508.07747",
        options={"relaxation": "groups"},
    ),
    "lantern": Preset(
        "jacobi",
        "budget",
        "as `sjd`; spends delta on tokens whose neighbours in the codebook are likely, after LANTERN "
        "(published rule: `acceptance=lantern`)",
        "2410.03355",
        options={"relaxation": "neighbours"},
    ),
    "cool": Preset(
        "jacobi",
        "cool",
        "as `sjd`; accepts more at the first place of the window, and with `nu` below 0.69 at later ones",
        "2601.09212",
    ),
}


@dataclass(frozen=True)
class Accelerator:
    """A drafter with a rule that is sound for it; or a schedule, with a rule for what it puts on trial.

    Attributes:
        costs: what each size of a draft is known to pay, by batch size, where that chooses the size; None
            where sizes are fixed. It fills as batches are decoded.

    Raises:
        InputError: the rule is not sound for what the drafter proposes, or there are no sizes to choose from.
    """

    name: str
    drafter: Drafter
    rule: AcceptanceRule
    schedule: Schedule | None = None
    costs: dict[int, CostModel] | None = None

    def __post_init__(self) -> None:
        if self.costs is not None and not self.drafter.sizes:
            raise InputError("length", "cost", f"'fixed': drafts of {self.name!r} have one size")
        proposer = self.drafter if self.schedule is None else self.schedule
        if not is_sound(type(self.rule), proposer):
            sound = sorted(rule for rule in ACCEPTANCE_RULES if is_sound(ACCEPTANCE_RULES[rule], proposer))
            shape = "trees" if proposer.branches else "chains"
            raise InputError(
                "acceptance",
                type(self.rule).__name__,
                f"it is not sound for {proposer.kind.value} {shape} and would bias the output; "
                f"for {self.name} with these options use one of: {', '.join(sound)}",
            )

    @property
    def exactness(self) -> str:
        return self.rule.promise if self.schedule is None else self.schedule.exactness

    def fit(self, target: Target[Any]) -> Accelerator:
        """This accelerator for that target.

        Raises:
            InputError: the drafter, the rule or the schedule does not fit the target.
        """
        schedule = None if self.schedule is None else self.schedule.fit(target)
        drafter, rule = self.drafter.fit(target), self.rule.fit(target)
        costs: dict[int, CostModel] | None = None if self.costs is None else {}
        return replace(self, drafter=drafter, rule=rule, schedule=schedule, costs=costs)

    def decode(
        self,
        target: Any,
        sampler: Sampler,
        requests: Sequence[Request],
        sequences: Sequences,
        random: RandomStream,
    ) -> Iterator[Emission]:
        """Decode a batch with the loop that this accelerator is for; see `speculate` and `decode_cells`."""
        batch = sampler, requests, sequences, random
        if self.schedule is not None:
            return decode_cells(target, self.schedule, self.rule, *batch)
        drafter = self.drafter if self.costs is None else PacedDrafter(self.drafter, self.costs)
        return speculate(target, drafter, self.rule, *batch)

    def check(self, sampler: Sampler) -> None:
        """Raise InputError if the rule's promise does not hold for this way of sampling."""
        if self.rule.greedy_only and not sampler.greedy:
            raise InputError(
                "temperature",
                sampler.temperature,
                "acceptance='greedy' holds at temperature 0 only; use sample_and_match",
            )


def is_sound(rule: type[AcceptanceRule], proposer: Drafter | Schedule) -> bool:
    """True if the rule's promise holds for what is proposed."""
    return proposer.kind in rule.sound_for and not (rule.chains_only and proposer.branches)


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


def build_accelerator(
    name: str,
    *,
    acceptance: str | None = None,
    length: str = "fixed",
    stop_below: float | None = None,
    **options: object,
) -> Accelerator:
    """Make an accelerator from its name and the options of its drafter, rule and schedule.

    Args:
        name: of a preset.
        acceptance: another rule.
        length: of drafts: "fixed"; "confidence" goes no deeper where the drafter finds every path unlikely;
            "cost" chooses among a few sizes by what rounds cost and give here, and stops drafting for a while
            where none pays.
        stop_below: the probability of a path for "confidence"; 0.3 if None.
        options: of drafter, rule and schedule.

    Raises:
        InputError: unknown name, unsound pairing, or a value outside its range.
        UnknownArgumentError: an option that none of them has.
    """
    preset = find_preset(name)
    drafter_class = DRAFTERS[preset.drafter]
    defaults = (preset.acceptance, *preset.otherwise)
    rule_classes = [ACCEPTANCE_RULES[rule] for rule in (defaults if acceptance is None else [acceptance])]
    schedule_class = None if preset.schedule is None else SCHEDULES[preset.schedule]
    for_drafter, for_rule = keywords(drafter_class), set[str]().union(*map(keywords, rule_classes))
    for_schedule = set() if schedule_class is None else keywords(schedule_class)
    known = for_drafter | for_rule | for_schedule
    for option in options:
        if option not in known:
            allowed = did_you_mean(option, sorted(known | {"acceptance", "length", "stop_below"}))
            raise UnknownArgumentError(f"option of accelerator {name!r}", option, allowed)
    options = {key: value for key, value in preset.options.items() if key in known} | options
    if is_integer(drafted := options.get("num_draft_tokens")) and drafted == 0:  # no draft: plain decoding
        drafter_class, for_drafter = DRAFTERS["none"], set()
    drafter = drafter_class(**{key: value for key, value in options.items() if key in for_drafter})
    drafter = with_length(drafter, length, stop_below)
    costs: dict[int, CostModel] | None = {} if length == "cost" else None
    rule_class = next((rule for rule in rule_classes if is_sound(rule, drafter)), rule_classes[0])
    rule = rule_class(**{key: value for key, value in options.items() if key in for_rule})
    if schedule_class is None:
        return Accelerator(name, drafter, rule, costs=costs)
    schedule = schedule_class(**{key: value for key, value in options.items() if key in for_schedule})
    return Accelerator(name, drafter, rule, schedule, costs)


def with_length(drafter: Drafter, length: str, stop_below: float | None) -> Drafter:
    """The drafter with drafts of that length; see `build_accelerator`."""
    if length not in LENGTHS:
        raise InputError("length", length, did_you_mean(length, LENGTHS))
    if length == "confidence":
        least = DEFAULT_STOP if stop_below is None else stop_below
        require_number("stop_below", least, 0.0, 1.0, "above 0, at most 1", open_below=True)
        return drafter.stopping_below(least)
    if stop_below is not None:
        raise InputError("stop_below", stop_below, "nothing: it goes with length='confidence'")
    return drafter


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
        needs = preset.needs or "nothing"
        rule = ACCEPTANCE_RULES[preset.acceptance]
        exactness = stated(preset.exactness, rule.bound if preset.schedule is None else None)
        source = (
            preset.source
            if preset.source == "-"
            else f"[{preset.source}](https://arxiv.org/abs/{preset.source})"
        )
        lines.append(f"| `{name}` | {preset.summary} | {exactness} | {needs} | {source} |")
    lines += ["", "| `acceptance=` | exact / bound / lossy | for drafts that are |", "|---|---|---|"]
    for name in ACCEPTANCE_RULES:
        rule = ACCEPTANCE_RULES[name]
        exactness = stated(rule.exactness, rule.bound) + (" at temperature 0" if rule.greedy_only else "")
        kinds = ", ".join(kind.value.replace("_", " ") for kind in DraftKind if kind in rule.sound_for)
        lines.append(f"| `{name}` | {exactness} | {kinds} |")
    return "\n".join(lines)


def stated(exactness: str, bound: str | None) -> str:
    """A promise with its bound, or with the word that there is none."""
    if bound is not None:
        return f"{exactness}: TV at most {bound}"
    return exactness if exactness == "exact" else f"{exactness}, no bound"
