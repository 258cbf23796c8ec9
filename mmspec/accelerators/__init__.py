"""Typed presets of accelerators, and their names.

Adding a method adds a preset here; a head that drafts needs none (`mmspec.heads`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args, get_type_hints

from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from mmspec.accelerators.accelerator import DEFAULT_RULES, Accelerator, pair
from mmspec.acceptance import ACCEPTANCE_RULES
from mmspec.acceptance.adablock import AdaBlock
from mmspec.acceptance.budget import Budget
from mmspec.acceptance.confidence import LowConfidence
from mmspec.acceptance.cool import Cool
from mmspec.acceptance.denoising import CSpD, Reflection, SharedNoise
from mmspec.acceptance.maskgit import MaskGIT
from mmspec.acceptance.rejection import SpeculativeSampling
from mmspec.acceptance.renoise import Renoise
from mmspec.acceptance.state_walk import CellWalk, StateWalk
from mmspec.drafters import DRAFTERS
from mmspec.drafters.adaptive_blocks import AdaptiveBlocksDrafter
from mmspec.drafters.any_subset import AnySubsetDrafter
from mmspec.drafters.cell_order import ONE_BY_ONE, CellModelDrafter, CellOrderDrafter
from mmspec.drafters.cell_states import CellStatesDrafter
from mmspec.drafters.copy import CopyDrafter
from mmspec.drafters.copy_beside_head import CopyBesideHeadDrafter
from mmspec.drafters.draft_model import LENGTH, DraftModelDrafter
from mmspec.drafters.early_exit import EarlyExitDrafter
from mmspec.drafters.jacobi import JacobiDrafter
from mmspec.drafters.masked_blocks import UnmaskingDrafter
from mmspec.drafters.masked_model import MaskedModelDrafter
from mmspec.drafters.noise_canvas import NoiseCanvasDrafter
from mmspec.drafters.none import NoDrafter
from mmspec.drafters.parallel_cells import OrderedCellsDrafter, RecentBlocksDrafter, SurestCellsDrafter
from mmspec.drafters.self_speculation import SelfSpeculationDrafter
from mmspec.drafters.staircase import StaircaseDrafter
from mmspec.drafters.states import StatesDrafter
from mmspec.drafters.vectors import VectorModelDrafter, VectorWindowDrafter
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.heads import HEADS
from mmspec.models.mar import FeatureCaching
from mmspec.registry import did_you_mean
from mmspec.targets import CausalTarget, MaskedTarget, adapt
from mmspec.targets.image_families import continuous_target
from mmspec.targets.mar import MARTarget
from mmspec.validation import is_integer, plain_numbers


class WindowOptions(TypedDict, total=False):
    """Options of a Jacobi window, as of `JacobiDrafter`."""

    window: int | None
    coupling: str
    init: str
    front: str | Sequence[int]
    reach: int | None
    reuse: float | None


class TreeOptions(TypedDict, total=False):
    """Options of a head's drafter; `tree` and `sampling` not of all, the last of FLASH and of PPD alone."""

    num_draft_tokens: int | None
    depth: int | None
    top_k: int | None
    tree: str | int | Sequence[int]
    sampling: str
    block: int | None
    probes_per_node: float


def none() -> Accelerator:
    """Plain decoding through the same loop."""
    return pair("none", NoDrafter())


def copy(
    num_draft_tokens: int = 16, min_match: int = 1, top_k: int = 8, corpus: str | Path | None = None
) -> Accelerator:
    """Prompt look-up (Saxena, 2023), several continuations as a tree; options as of `CopyDrafter`."""
    return pair("copy", CopyDrafter(num_draft_tokens, min_match, top_k, corpus))


def draft_model(
    model: PreTrainedModel | CausalTarget | MARTarget,
    num_draft_tokens: int | None = None,
    sampling: str | None = None,
    tree: str | int | Sequence[int] | None = None,
    keep: float | None = None,
    mass: float | None = None,
) -> Accelerator:
    """Drafts of a smaller model of the same tokenizer (2211.17192), or of the same continuous tokens.

    Args:
        model: the draft model; a masked language model drafts as DiffuSpec does (`MaskedModelDrafter`).
        num_draft_tokens: length of a draft; 5 if None.
        tree, keep, mass: as of `DraftModelDrafter`; continuous tokens are drafted as chains.
        sampling: as of `DraftModelDrafter` or `VectorModelDrafter`; None is "coupled" for the former, judged
            by `sample_and_match`, and "sampled" for the latter, judged by `reflection`. A MAR's drafts are
            sampled, and judged by `speculative_sampling` of whole chains; what they keep is one cell a
            forward, as of `cspd`.
    """
    if isinstance(model, PreTrainedModel):
        reader: Any = continuous_target(model) or adapt(model)
    else:
        reader = model
    if isinstance(reader, MaskedTarget):
        for name, value in (("sampling", sampling), ("tree", tree), ("keep", keep), ("mass", mass)):
            if value is not None:
                raise InputError(name, value, "None: a masked model drafts a path that is searched for")
        return pair("draft_model", MaskedModelDrafter(reader, num_draft_tokens))
    if not reader.vector_size:
        how = sampling or "coupled", tree, keep, mass
        return pair("draft_model", DraftModelDrafter(reader, num_draft_tokens, *how))
    for name, value in (("tree", tree), ("keep", keep), ("mass", mass)):
        if value is not None:
            raise InputError(
                name, value, "None: continuous tokens are drafted as chains, by all that is read"
            )
    length = LENGTH if num_draft_tokens is None else num_draft_tokens
    if reader.any_order:
        cells = CellModelDrafter(reader, length)
        return Accelerator("draft_model", cells, SpeculativeSampling())
    vectors = VectorModelDrafter(reader, length, sampling or "sampled")
    rule = SharedNoise() if sampling == "coupled" else Reflection()
    return Accelerator("draft_model", vectors, rule)


def cspd(
    model: PreTrainedModel | MARTarget,
    num_draft_tokens: int = 8,
    prefill: float = 0.05,
    order: str = "random",
    see_drafts: bool = True,
    last_noise: bool = True,
    shared_guidance: bool = False,
    rollback: bool = True,
) -> Accelerator:
    """Continuous speculative decoding of a MAR (CSpD, 2411.11925), exact unless its biases are asked for.

    Exact to one cell a forward, each given all before it: not to `masked`, whose cells of one forward do not
    know of each other.

    As its authors released it: `see_drafts=False, last_noise=False, shared_guidance=True, rollback=False`,
    with the rule `CSpD(temperature=42, variance_factor="released", max_tries=100)`. Options as of
    `CellModelDrafter`, and by name those of `CSpD`.
    """
    reader: Any = continuous_target(model) if isinstance(model, PreTrainedModel) else model
    if reader is None or not reader.any_order:
        raise InputError("drafter", type(model).__name__, "a MAR that drafts for a MAR")
    switches = see_drafts, last_noise, shared_guidance, rollback
    return Accelerator("cspd", CellModelDrafter(reader, num_draft_tokens, prefill, order, *switches), CSpD())


def shared_noise(tolerance: float = 0.1, window: int = 16) -> Accelerator:
    """A window of continuous tokens that the target drafts for itself, the noise of each place kept.

    What is emitted is always the target's own draw; what it is conditioned on may be off by the tolerance.
    Options as of `VectorWindowDrafter` and `SharedNoise`.
    """
    return Accelerator("shared_noise", VectorWindowDrafter(window), SharedNoise(tolerance))


def low_confidence(
    places_per_step: int = 1,
    block_length: int | None = None,
    cache: str = "none",
    remask_below: float = 0.0,
    denoising_steps: int | None = None,
    end_cut: bool = False,
) -> Accelerator:
    """Places of a masked language model in the order of their confidence (LLaDA, 2502.09992).

    Args:
        places_per_step, remask_below, denoising_steps, end_cut: as of `LowConfidence`; one place a step over
            the whole output, or in the model's own blocks, is plain decoding.
        block_length, cache: as of `UnmaskingDrafter`.
    """
    rule = LowConfidence(places_per_step, remask_below, end_cut, denoising_steps=denoising_steps)
    return Accelerator("low_confidence", UnmaskingDrafter(block_length, cache), rule)


def unmasked(
    name: str, *, block_length: int | None = None, cache: str = "none", **options: Any
) -> Accelerator:
    """Places of a masked language model, several in a forward as a rule chooses them.

    Args:
        name: of the rule, one that judges places; a key of `ACCEPTANCE_RULES`.
        block_length, cache: as of `UnmaskingDrafter`.
        options: of the rule.
    """
    return Accelerator(name, UnmaskingDrafter(block_length, cache), ACCEPTANCE_RULES[name](**options))


def adablock(
    delimiters: int | Sequence[int] = (),
    threshold: float = 0.9,
    delimiter_threshold: float = 0.3,
    block_length: int = 32,
    window: float = 0.25,
    places_per_step: int = 1,
    cache: str = "none",
) -> Accelerator:
    """Places that are sure enough, in blocks that end where a line does (AdaBlock-dLLM, 2509.26432).

    Options as of the rule `AdaBlock`, and `cache` as of `UnmaskingDrafter`.
    """
    rule = AdaBlock(
        places_per_step=places_per_step,
        threshold=threshold,
        delimiters=delimiters,
        delimiter_threshold=delimiter_threshold,
        block_length=block_length,
        window=window,
    )
    return Accelerator("adablock", AdaptiveBlocksDrafter(rule, cache), rule)


def renoise(
    entropy_bound: float | None = None,
    denoising_steps: int | None = None,
    t_min: float | None = None,
    t_max: float | None = None,
    stability_threshold: int | None = None,
    confidence_threshold: float | None = None,
) -> Accelerator:
    """Canvases of noise, in steps of one's own in place of the checkpoint's; options as of `Renoise`."""
    heat = t_min, t_max, stability_threshold, confidence_threshold
    rule = Renoise(entropy_bound, denoising_steps, *heat)
    return Accelerator("renoise", NoiseCanvasDrafter(rule), rule)


def assd(num_draft_tokens: int = 5, sampling: str = "sampled") -> Accelerator:
    """Gaps of a text drafted by the model that fills them (2504.20456); options as of `AnySubsetDrafter`."""
    return pair("assd", AnySubsetDrafter(num_draft_tokens, sampling))


def self_speculation(num_draft_tokens: int = 8, sampling: str = "coupled") -> Accelerator:
    """Drafts by masked blocks of the target itself (2607.05722); options as of `SelfSpeculationDrafter`."""
    return pair("self_speculation", SelfSpeculationDrafter(num_draft_tokens, sampling))


def early_exit(layers: int | str = "auto", num_draft_tokens: int = 6) -> Accelerator:
    """Drafts by the target's own first layers (2404.16710, 2504.05598); options as of `EarlyExitDrafter`."""
    return pair("early_exit", EarlyExitDrafter(layers, num_draft_tokens))


def freedave(states: int = 8, head: Any = None) -> Accelerator:
    """States of a masked block that are guessed to follow, scored in one forward (FreeDave, 2510.00294).

    The output is that of one place a forward. Options as of `StatesDrafter`.
    """
    return Accelerator("freedave", StatesDrafter(states, head), StateWalk())


def masked(
    iterations: int | None = None,
    order: str = "random",
    last_steps: int | None = None,
    annealing: str = "linear",
    refresh: int | None = None,
    share: float = 0.1,
    test_layer: int = 3,
) -> Accelerator:
    """Several cells of an image in a forward, in any order (MAR, 2406.11838).

    The published order in 64 forwards is the model's plain decoding, in which cells of one forward are
    independent of each other; all else is approximate to it.

    Args:
        iterations, order, last_steps, annealing: as of `CellOrderDrafter`.
        refresh: forwards from one that computes all tokens to the next, where features are cached (LazyMAR,
            2503.12450); None computes all in every forward.
        share, test_layer: as of `FeatureCaching`.
    """
    caching = None if refresh is None else FeatureCaching(refresh, share=share, test_layer=test_layer)
    return pair("masked", CellOrderDrafter(iterations, order, last_steps, annealing, caching))


def lpd(
    order: str | None = None,
    generation_steps: int | None = None,
    repulsion_threshold: int | None = None,
    proximity_threshold: float | None = None,
    regions: int | None = None,
    states: int = 1,
) -> Accelerator:
    """Groups of cells of an image, each asked for by learned queries (LPD, 2507.01957).

    Args:
        order, generation_steps, repulsion_threshold, proximity_threshold, regions: as of `DecodingOrder`;
            None is the model's own order, which is its plain decoding.
        states: most groups that a forward decides; the images are those of one (FreeDave, 2510.00294). As of
            `CellStatesDrafter`.
    """
    thresholds = {"repulsion_threshold": repulsion_threshold, "proximity_threshold": proximity_threshold}
    steps = {"generation_steps": generation_steps, "regions": regions}
    options: dict[str, Any] = {"order": order, **steps, **thresholds}
    if states == 1:
        return pair("lpd", OrderedCellsDrafter(**options))
    return Accelerator("lpd", CellStatesDrafter(states, **options), CellWalk())


def maskgit(iterations: int = 12, choice_temperature: float = 4.5) -> Accelerator:
    """The surest of all open cells of an image in each forward (MaskGIT, 2202.04200).

    Args:
        iterations: as of `SurestCellsDrafter`.
        choice_temperature: as of the rule `MaskGIT`.
    """
    return Accelerator("maskgit", SurestCellsDrafter(iterations), MaskGIT(choice_temperature))


def sparse_context(context_blocks: int = 16) -> Accelerator:
    """Blocks of a clip that see the first block and the most recent ones (BlockVid, 2511.22973)."""
    return pair("sparse_context", RecentBlocksDrafter(context_blocks))


def trained_head(
    name: str,
    model: PreTrainedModel,
    copy: bool = False,
    corpus: str | Path | None = None,
    **tree: Unpack[TreeOptions],
) -> Accelerator:
    """Drafts of a loaded head that was trained for the target.

    Args:
        name: a key of `mmspec.heads.HEADS`.
        model: of that kind.
        copy: whether what the text repeats competes with the head's candidates for the places of a tree.
        corpus: as of `CopyDrafter`; it competes, too, and so do copies.
        tree: options of its drafter.
    """
    drafter: Any = DRAFTERS[name]
    return pair(name, with_copies(drafter(model, **tree), copy, corpus))


def with_copies(drafter: Any, /, copy: bool = False, corpus: str | Path | None = None) -> Any:
    """Put copies beside the candidates of a head, where that is asked for; see `trained_head`."""
    return CopyBesideHeadDrafter(drafter, corpus) if copy or corpus is not None else drafter


def zipar(zipar_window: int | None = None, adaptive: bool = False, window: int = 1) -> Accelerator:
    """ZipAR (2412.04062): rows of an image decoded as a staircase; options as of `StaircaseDrafter`."""
    return pair("zipar", StaircaseDrafter(zipar_window, adaptive, window))


def sjd(**window: Unpack[WindowOptions]) -> Accelerator:
    """Speculative Jacobi decoding (2410.01699), exact."""
    return pair("sjd", JacobiDrafter(**window))


def gsd(delta: float = 0.1, group_size: int = 14, **window: Unpack[WindowOptions]) -> Accelerator:
    """The delta-budget rule over groups of tokens of like probability, after GSD (2508.07747)."""
    rule = Budget(delta, "groups", group_size=group_size)
    return Accelerator("gsd", JacobiDrafter(**window), rule)


def lantern(
    delta: float = 0.1, neighbours: int = 100, metric: str = "l2", **window: Unpack[WindowOptions]
) -> Accelerator:
    """The delta-budget rule over neighbours in the codebook, after LANTERN (2410.03355)."""
    rule = Budget(delta, "neighbours", neighbours, metric)
    return Accelerator("lantern", JacobiDrafter(**window), rule)


def cool(
    omega: float = 2.0, nu: float = 0.7, mu: float = 0.0, **window: Unpack[WindowOptions]
) -> Accelerator:
    """COOL-SD's annealed relaxation (2601.09212) on a Jacobi window; lossy."""
    return Accelerator("cool", JacobiDrafter(**window), Cool(omega, nu, mu))


@dataclass(frozen=True)
class Preset:
    """Named accelerator, as `accelerator=` takes it.

    Attributes:
        make: the typed function; it takes the loaded `model` first where one is needed.
        summary: what it does, for the table of accelerators.
        source: the paper's arXiv id.
        needs: what `drafter=` has to be, in words; None where nothing is needed.
        keeps: what "exact" refers to, in words, where that has to be said and no drafter is there to say it.
    """

    make: Callable[..., Accelerator]
    summary: str
    source: str = "-"
    needs: str | None = None
    keeps: str | None = None

    @property
    def options(self) -> set[str]:
        """Names of the options that `make` takes, the model not among them."""
        return set().union(*map(keywords, self.makers)) - {"model"}

    @property
    def makers(self) -> tuple[Callable[..., object], ...]:
        """The functions and classes whose arguments the options are."""
        make = self.make
        if not isinstance(make, partial):
            return (make,)
        (name,) = make.args
        if make.func is unmasked:
            return ACCEPTANCE_RULES[name], UnmaskingDrafter
        drafter = DRAFTERS[name]
        return (drafter, with_copies) if drafter.shares_tree else (drafter,)

    @property
    def promise(self) -> tuple[str, str | None]:
        """The promise with default options: "exact", "bounded" or "lossy"; and the bound, or what is kept."""
        if self.needs is not None:  # all of these are judged by the default rule
            return "exact", self.keeps
        made = self.make()
        if made.drafter.exactness != "exact":
            return made.drafter.exactness, None
        exactness = "exact" if made.exactness == "exact" else made.rule.exactness
        return exactness, made.rule.bound or made.keeps or None


NEEDS_HEAD = "a head that was trained for the target"
ACCELERATORS = {
    "none": Preset(none, "plain decoding through the same loop"),
    "copy": Preset(copy, "copies the continuations of the longest suffixes seen before"),
    "draft_model": Preset(
        draft_model,
        "a smaller model of the same tokenizer, or of the same continuous tokens, drafts",
        "2211.17192",
        "a smaller model with the target's tokenizer or image tokenizer",
        f"the target's next token; of a MAR, {ONE_BY_ONE}",
    ),
    **{
        name: Preset(partial(trained_head, name), head.summary, head.source, NEEDS_HEAD)
        for name, head in HEADS.items()
    },
    "zipar": Preset(
        zipar, "nothing: rows of an image run as a staircase, `zipar_window` cells apart", "2412.04062"
    ),
    "sjd": Preset(
        sjd,
        "the target itself: it fills a window of places and redraws them round after round",
        "2410.01699",
    ),
    "gsd": Preset(
        gsd,
        "as `sjd`; spends delta on groups of tokens of like probability, after GSD "
        "(published rule: `acceptance=grouped`)",
        "2508.07747",
    ),
    "lantern": Preset(
        lantern,
        "as `sjd`; spends delta on tokens whose neighbours in the codebook are likely, after LANTERN "
        "(published rule: `acceptance=lantern`)",
        "2410.03355",
    ),
    "cspd": Preset(
        cspd,
        "a smaller MAR draws cells one after another; the last step of each is judged, exactly unless the "
        "switches of the released code are set",
        "2411.11925",
        "a smaller MAR of the same image tokenizer",
        ONE_BY_ONE,
    ),
    "shared_noise": Preset(
        shared_noise,
        "the target itself: a window of continuous tokens, each drawn again with its own noise; candidates "
        "within `tolerance` of the draw are kept",
        "2510.24211",
    ),
    "masked": Preset(
        masked,
        "nothing: a masked model (MAR) decides several cells in each of `iterations` forwards, in `order` "
        "random or checkerboard",
        "2406.11838",
    ),
    "lpd": Preset(
        lpd,
        "nothing: a model with queries for places (LPD) decides groups of cells, in `order` proximity, "
        "raster, random, diagonal, regions, blocks (rows) or checkerboard",
        "2507.01957",
    ),
    "maskgit": Preset(
        maskgit,
        "nothing: a model with queries for places (LPD) decides the surest of all open cells in each of "
        "`iterations` forwards",
        "2202.04200",
    ),
    "sparse_context": Preset(
        sparse_context,
        "nothing: a model of clips (NBP) whose blocks see the first block and the `context_blocks` most "
        "recent ones",
        "2511.22973",
    ),
    "low_confidence": Preset(
        low_confidence,
        "nothing: a masked language model (LLaDA, SDAR, Dream) decides `places_per_step` places in each "
        "forward, the surest first, block after block",
        "2502.09992",
    ),
    "adablock": Preset(
        adablock,
        "nothing: as `threshold`, in blocks that end behind a sure token of `delimiters`",
        "2509.26432",
    ),
    "assd": Preset(
        assd,
        "the target itself: an any-subset density model (XLNet) draws the next gaps of a text, which do not "
        "know of each other",
        "2504.20456",
    ),
    "renoise": Preset(
        renoise,
        "nothing: a model of canvases of noise (DiffusionGemma) keeps what is sure in each of at most "
        "`denoising_steps` steps, by `entropy_bound`",
        "2505.24857",
    ),
    "early_exit": Preset(
        early_exit,
        "the target itself: its first `layers` layers and its LM head, over its own keys and values",
        "2504.05598",
    ),
    "self_speculation": Preset(
        self_speculation,
        "the target itself: a model that was trained for both fills masked blocks behind every candidate, "
        "and judges them token by token",
        "2607.05722",
    ),
    "freedave": Preset(
        freedave,
        "the target itself: a block-causal masked model (SDAR) scores the states of a block that are guessed "
        "to follow",
        "2510.00294",
    ),
    **{
        name: Preset(partial(unmasked, name), f"nothing: as `low_confidence`; {summary}", source)
        for name, (summary, source) in {
            "sequential": ("the leftmost `places_per_step` places", "2510.06303"),
            "threshold": ("all places at least `threshold` sure", "2505.22618"),
            "factor": ("as many places as are sure together, by `factor`", "2505.22618"),
            "entropy_bound": ("places of low entropy, up to `entropy_bound` nats", "2505.24857"),
            "learned": ("all places that a trained `filter` is sure of (Learn2PD)", "2509.25188"),
            "prophet": ("all that is open, once the mean `gap` of logits is large", "2508.19982"),
            "end_weight": ("end tokens come late, by `end_weight` (EOSER)", "2509.23924"),
            "ascending": ("1, 2, 4, ... places, in log2(n) forwards (ASS)", "2509.23924"),
        }.items()
    },
    "cool": Preset(
        cool,
        "as `sjd`; accepts more at the first place of the window, and with `nu` below 0.69 at later ones",
        "2601.09212",
    ),
}


def list_accelerators() -> list[str]:
    """List the names that `accelerator=` takes."""
    return list(ACCELERATORS)


def find_preset(name: object) -> Preset:
    """Find the preset of that name.

    Raises:
        InputError: no such name; the message holds the nearest one.
    """
    if not isinstance(name, str) or name not in ACCELERATORS:
        raise InputError("accelerator", name, did_you_mean(name, ACCELERATORS))
    return ACCELERATORS[name]


class WithoutLayers(nn.Module):
    """Language model that computes nothing."""

    config = LlamaConfig(num_hidden_layers=0)

    def get_decoder(self) -> nn.Module:
        return self


@dataclass(frozen=True)
class DraftToCome:
    """Stand-in for a draft model that is not loaded yet, so that options can be checked without it."""

    vector_size: int = 0
    any_order: bool = False
    model: nn.Module = field(default_factory=WithoutLayers)


def option_names(name: str, acceptance: str | None = None) -> set[str]:
    """Names of the options that `build_accelerator` may take for a preset, with a rule of that name.

    Raises:
        InputError: no such preset, or no such rule.
    """
    preset = find_preset(name)
    if acceptance is not None:
        rules = [ACCEPTANCE_RULES[acceptance]]
    elif preset.needs is None:
        rules = [type(preset.make().rule)]
    else:  # which rule suits what is drafted, the loaded drafter says
        of_vectors = () if name in HEADS else ("reflection", "shared_noise", "cspd")
        rules = [ACCEPTANCE_RULES[rule] for rule in (*DEFAULT_RULES, *of_vectors)]
    of_rules = set().union(*map(keywords, rules))
    return preset.options | of_rules | {"acceptance", "length", "stop_below"}


def build_accelerator(
    name: str,
    *,
    acceptance: str | None = None,
    length: str = "auto",
    stop_below: float | None = None,
    **options: Any,
) -> Accelerator:
    """Make an accelerator from its name and the options of its preset and rule, as the command line does.

    Args:
        name: of a preset.
        acceptance: another rule, by its name.
        length, stop_below: as of `Accelerator.with_length`.
        options: of the preset, and of the rule.

    Raises:
        InputError: unknown name, unsound pairing, or a value outside its range.
        UnknownArgumentError: an option that neither of them has.
    """
    options = plain_numbers(options)
    preset = find_preset(name)
    rule_class = None if acceptance is None else ACCEPTANCE_RULES[acceptance]
    of_rule = set() if rule_class is None else keywords(rule_class)
    own = {key: value for key, value in options.items() if key in preset.options - of_rule | {"model"}}
    plain = is_integer(drafted := own.get("num_draft_tokens")) and drafted == 0  # no draft
    made = replace(none(), name=name) if plain else preset.make(**own)
    if rule_class is None:
        of_rule = keywords(type(made.rule))
    for option in options.keys() - own.keys() - of_rule:
        known = preset.options | of_rule | {"acceptance", "length", "stop_below"}
        raise UnknownArgumentError(f"option of accelerator {name!r}", option, did_you_mean(option, known))
    given = {key: value for key, value in options.items() if key not in own}
    if rule_class is not None:
        made = made.with_rule(rule_class(**given))
    elif given:
        made = made.with_rule(replace(made.rule, **given))  # type: ignore[type-var]  # rules with options are dataclasses
    return made.with_length(length, stop_below)


def keywords(function: Callable[..., object]) -> set[str]:
    """Names of the arguments of a function or constructor, those of a `TypedDict` of keywords included."""
    names = set()
    for name, item in inspect.signature(function).parameters.items():
        if item.kind is item.VAR_KEYWORD:
            (options,) = get_args(get_type_hints(function)[name])
            names |= set(options.__annotations__)
        elif item.kind is item.POSITIONAL_OR_KEYWORD:
            names.add(name)
    return names
