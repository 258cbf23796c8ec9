"""The Jacobi drafter: its distribution, its identity with plain decoding, its forwards, its refusals."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding import cache
from mmspec.decoding.canvas import Canvas, Stopping
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.image_grid import FREE, ImageGrid
from mmspec.decoding.interfaces import Drafter, PromptOutput, Request, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.sparse_distribution import SparseDistribution
from mmspec.decoding.speculative import speculate
from mmspec.decoding.stats import DecodingStats
from mmspec.drafters.jacobi import JacobiDrafter
from mmspec.drafters.jacobi_session import INITS, JacobiSession, WindowDrafter
from mmspec.drafters.none import NoDrafter
from mmspec.drafters.window import KIND_OF_COUPLING
from mmspec.errors import InputError, NumericalError
from mmspec.kernels.redraw import invert
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import CausalTarget
from mmspec.targets.causal import CausalState
from mmspec.targets.llamagen import LlamaGenTarget
from tests.contracts import distributions
from tests.contracts.checks import PROMPTS, joint_of, precise
from tests.contracts.running import FanOutTarget, canvas_of, decode
from tests.decoding.test_rounds import counted_reads
from tests.drafters import jacobi_checks as checks
from tests.drafters.jacobi_checks import ToyImages, check_distribution, mean_forwards, rule_for
from tests.models.converted import convert_and_load
from tests.models.naive_llamagen import class_prefix, naive_greedy
from tests.models.official_layout import CLASSES, HEADS, transformer_state
from tests.targets.image_loop import draw as draw_images
from tests.tiny_models import tiny_lm, tiny_lm_v8

GRID = ImageGrid(rows=5, columns=6, codebook_size=62, row_end=62, ending=(63,))
SAMPLER = Sampler(0.9, top_k=40, top_p=0.95)
SEEDS = [7, 8, 9]
TREE: dict[str, Any] = {"front": (4, 2), "reach": 3}


def draw(
    drafter: Drafter,
    rows: Sequence[int] = (0, 1, 2),
    sampler: Sampler = SAMPLER,
    target: ToyImages | None = None,
    grid: ImageGrid = GRID,
    end: Sequence[int] = (),
) -> tuple[list[list[int]], DecodingStats, Canvas]:
    """Images of some of the prompts, each with its own seed."""
    target = target or images()
    negative = {"input_ids": torch.tensor([list(PROMPTS[0])])}
    requests = [
        Request({"input_ids": torch.tensor([list(PROMPTS[row])])}, negative_inputs=negative, grid=grid)
        for row in rows
    ]
    stats = DecodingStats()
    prompts = [request.prompt_tokens for request in requests]
    stopping = Stopping(grid.length, frozenset(end))
    canvas = Canvas(prompts, stopping, stats, target.device)
    stream = RandomStream.from_seed([SEEDS[row] for row in rows], len(rows))
    rule = rule_for(drafter) if isinstance(drafter, WindowDrafter) else SampleAndMatch()
    for _ in speculate(target, drafter, rule, sampler, requests, canvas, stream):
        pass
    return canvas.outputs(), stats, canvas


@functools.cache
def images() -> ToyImages:
    return ToyImages(tiny_lm(), GRID)


@functools.cache
def plain(sampler: Sampler = SAMPLER) -> list[list[int]]:
    return draw(NoDrafter(), sampler=sampler)[0]


DISTRIBUTIONS = {
    "maximal, 4": (JacobiDrafter(4), Sampler(1.0), 40_000),
    "maximal, 4, repeat": (JacobiDrafter(4, init="repeat"), Sampler(1.0)),
    "fresh, 2": (JacobiDrafter(2, "fresh"), Sampler(1.0)),
    "fresh, 4, top-k": (JacobiDrafter(4, "fresh", "uniform"), Sampler(1.0, top_k=3)),
    "maximal, 2, top-p": (JacobiDrafter(2, "maximal", "above"), Sampler(1.0, top_p=0.8)),
    "maximal, 4, cold": (JacobiDrafter(4), Sampler(0.6)),
    "maximal, 4, guided": (JacobiDrafter(4), Sampler(1.0, guidance_scale=3.0)),
    "gumbel, 4": (JacobiDrafter(4, "gumbel"), Sampler(1.0)),
    "gumbel, 4, hot": (JacobiDrafter(4, "gumbel", "repeat"), Sampler(1.4, min_p=0.05)),
    "maximal, tree": (JacobiDrafter(4, front="3x2x2"), Sampler(1.0)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@torch.inference_mode()
def test_images_follow_the_targets_distribution(name: str) -> None:
    check_distribution(*DISTRIBUTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "coupling", "init"),
    [
        (1, "fresh", "edge"),
        (2, "exact", "uniform"),
        (2, "gumbel", "above"),
        (4, "maximal", "uniform"),
        (4, "fresh", "repeat"),
        (6, "maximal", "above"),
        (6, "gumbel", "edge"),
        (6, "exact", "repeat"),
    ],
)
@torch.inference_mode()
def test_windows_couplings_and_inits_follow_the_distribution(window: int, coupling: str, init: str) -> None:
    check_distribution(JacobiDrafter(window, coupling, init), Sampler(1.0), rows=100_000)
    if window > 1:
        tree = JacobiDrafter(window, coupling, init, "3x2"[: 2 * window - 3], window - 1)
        check_distribution(tree, Sampler(0.8, top_k=4, guidance_scale=1.5))


@pytest.mark.parametrize("name", ["cold", "tree, top-k"])
@torch.inference_mode()
def test_tokens_of_a_transformer_follow_its_distribution(name: str) -> None:
    """Every prefix read without a cache is the judge; rows of one batch are the sample."""
    drafter, sampler = {
        "cold": (JacobiDrafter(4), Sampler(0.6)),
        "tree, top-k": (JacobiDrafter(3, front="3x3", reach=2), Sampler(1.0, top_k=4)),
    }[name]
    target, prompt = FanOutTarget(tiny_lm_v8()), (3, 1, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "CAPACITY_BLOCK", 16)  # thousands of rows of 256 places would be gigabytes
        rule = rule_for(drafter)
        run = decode(target, [prompt] * 8_000, drafter, rule, sampler, max_new_tokens=5, seed=7)
    distributions.check_outputs(run, joint_of(target, prompt, 5, sampler), name)


def test_images_of_llamagen(tmp_path: Path) -> None:
    """A checkpoint in the official layout: the greedy image of a naive loop, draws as plain ones."""
    state = transformer_state(seed=9, **CLASSES)
    target = LlamaGenTarget(convert_and_load(tmp_path, state))
    side = target.grid.columns
    requests = image_requests(target, class_labels=[0, 4], guided=False)
    greedy = [naive_greedy(state, HEADS, side, class_prefix(state, label), side**2) for label in (0, 4)]
    for options in ({}, {"coupling": "exact"}, {"init": "above"}):
        accelerator = build_accelerator("sjd", window=6, **options).fit(target)
        assert draw_images(target, accelerator, requests)[0] == greedy
    expected, _ = draw_images(target, build_accelerator("none"), requests, temperature=1.0)
    exact = build_accelerator("sjd", window=side**2, coupling="exact").fit(target)
    assert draw_images(target, exact, requests, temperature=1.0)[0] == expected


def test_inversion_draws_every_token_with_its_own_probability() -> None:
    """On an even grid of uniforms the shares are the probabilities; what has none is never drawn."""
    p = torch.tensor([0.0, 0.125, 0.0, 0.5, 0.375, 0.0]).expand(1, 800, 6)
    u = torch.stack([(torch.arange(800) + 0.5) / 800, torch.full((800,), 0.5)], -1).double()[None]
    assert torch.bincount(invert(p, u)[0], minlength=6).tolist() == [0, 100, 0, 400, 300, 0]
    edges = torch.tensor([[[2**-25, 2**-25], [1 - 2**-25, 1 - 2**-25]]], dtype=torch.float64)
    assert invert(p[:, :2], edges).tolist() == [[1, 4]]


@pytest.mark.parametrize("init", INITS)
def test_every_init_gives_the_images_of_plain_decoding(init: str) -> None:
    """Greedy with any coupling, and bitwise with the target's own noise, which saves forwards."""
    for window in (1, 3, 32):
        outputs, stats, _ = draw(JacobiDrafter(window, "exact", init))
        assert outputs == plain(), window
        assert window == 1 or stats.target_forwards < GRID.length
    for coupling in KIND_OF_COUPLING:
        assert draw(JacobiDrafter(8, coupling, init), sampler=Sampler())[0] == plain(Sampler()), coupling


def test_images_of_several_sizes_share_a_batch() -> None:
    """Each row has its own places, grammar and neighbours."""
    small = ImageGrid(rows=3, columns=2, codebook_size=62, row_end=62, ending=(63,))
    for init in INITS:
        drafter = JacobiDrafter(8, init=init)
        sessions = []
        for grids in ([GRID, small], [GRID], [small]):
            requests = [Request({"input_ids": torch.tensor([[1, 2]])}, grid=grid) for grid in grids]
            stream = RandomStream.from_seed([7] * len(grids), len(grids))
            prompt = PromptOutput(torch.zeros(len(grids), 1, 64))
            sessions.append(drafter.start(requests, prompt, SAMPLER, stream))
        both, *single = (
            session.propose(canvas_of([[1, 2, 5, 62, 4]] * n, emitted=3))
            for session, n in zip(sessions, (2, 1, 1), strict=True)
        )
        for row, alone in enumerate(single):
            assert torch.equal(both.tokens[row], alone.tokens[0])
            assert torch.equal(both.valid[row], alone.valid[0])


def test_text_needs_no_grid() -> None:
    """The same drafter on a language model: bitwise with the target's noise, greedy with any."""
    expected = decode(precise(), PROMPTS, sampler=SAMPLER, max_new_tokens=24, seed=SEEDS).outputs
    for init in ("edge", "uniform"):
        run = decode(
            precise(), PROMPTS, JacobiDrafter(6, "exact", init), None, SAMPLER, max_new_tokens=24, seed=SEEDS
        )
        assert run.outputs == expected


@torch.inference_mode()
def test_coupled_drafts_save_forwards() -> None:
    checks.coupled_drafts_save_forwards()


@torch.inference_mode()
def test_maximal_coupling_needs_half_the_forwards_and_honest_drafts_help() -> None:
    fresh, maximal = (mean_forwards(JacobiDrafter(32, coupling)) for coupling in ("fresh", "maximal"))
    assert fresh / maximal >= 1.5
    copied = [mean_forwards(JacobiDrafter(32, init=init)) for init in ("repeat", "above")]
    assert maximal <= min(copied)
    siblings = mean_forwards(JacobiDrafter(32, **TREE))
    assert mean_forwards(JacobiDrafter(32, front=TREE["front"])) <= siblings < maximal


def test_neighbours_are_the_nearest_covered_cells() -> None:
    checks.neighbours_are_the_nearest_covered_cells()


class Watched(JacobiDrafter):
    """Looks at every draft."""

    def start(self, requests, prefill, sampler, random):  # type: ignore[no-untyped-def]
        session = super().start(requests, prefill, sampler, random)
        self.nodes, real = set(), session.propose

        def propose(canvas: Canvas) -> Draft:
            draft = real(canvas)
            self.nodes.add(draft.tokens.shape[1])
            place = (canvas.emitted[:, None] - 1 + draft.depth).clamp_max(GRID.length)
            forced = torch.tensor([*GRID.forced, 63])[place]
            inside = (place < GRID.length) & draft.valid
            assert ((draft.tokens == forced) | (forced == FREE) | ~inside).all(), "syntax where it is forced"
            assert ((draft.tokens < GRID.codebook_size) | (forced != FREE) | ~inside).all(), "codes elsewhere"
            assert not (draft.valid & (place == GRID.length))[:, 1:].any(), "nothing beyond the end"
            if draft.q is not None:
                mass = draft.q.p.gather(-1, draft.tokens[:, :, None])[..., 0]
                assert (mass > 0)[:, 1:][draft.valid[:, 1:]].all()
                assert torch.allclose(draft.q.p.sum(-1)[inside], torch.ones(()).double())
            siblings = draft.tokens[:, None, :] == draft.tokens[:, :, None]
            same_parent = draft.parents[:, None, :] == draft.parents[:, :, None]
            both = draft.valid[:, None, :] & draft.valid[:, :, None]
            twins = (siblings & same_parent & both)[:, 1:, 1:].sum((1, 2))
            assert (twins == draft.valid[:, 1:].sum(1)).all(), "no candidate twice"
            return draft

        session.propose = propose
        return session


@pytest.mark.parametrize("init", INITS)
def test_drafts_obey_the_grammar_and_have_one_shape(init: str) -> None:
    for coupling, tree in (("fresh", {}), ("maximal", TREE), ("gumbel", TREE), ("exact", TREE)):
        drafter = Watched(8, coupling, init, **tree)
        draw(drafter)
        assert drafter.nodes == {25 if tree else 8} == {drafter.max_nodes}


@pytest.mark.parametrize("init", ["edge", "above"])
def test_proposing_reads_nothing_from_the_device(init: str) -> None:
    for coupling, tree in (("maximal", {}), ("exact", TREE)):
        drafter = JacobiDrafter(8, coupling, init, **tree)
        requests = [Request({"input_ids": torch.tensor([[1, 2]])}, grid=GRID)]
        random = RandomStream.from_seed(0, 1)
        session = drafter.start(requests, PromptOutput(torch.randn(1, 1, 64)), SAMPLER, random)
        canvas = canvas_of([[1, 2, 5]], emitted=1)
        with counted_reads() as reads:
            for _ in range(2):
                draft = session.propose(canvas)
                scores = SAMPLER(torch.zeros(1, drafter.max_nodes, 64), draft, canvas.ids)
                verdict = rule_for(drafter).verify(draft, scores, random, canvas.emitted)
                session.observe(draft, TargetOutput(scores.logits), scores, verdict)
        assert not reads


class Poisoned(ToyImages):
    """Row 1 has NaN for the token at output index `at`; or, `ahead`, for all from two places on."""

    def __init__(self, at: int, ahead: bool = False) -> None:
        super().__init__(tiny_lm(), GRID)
        self.at, self.ahead = at, ahead

    def score(self, state: CausalState, draft: Draft) -> TargetOutput:
        logits = super().score(state, draft).logits.clone()  # type: ignore[arg-type]
        index = (state.cache.lengths - state.starts)[1] + draft.depth[1] + 1  # type: ignore[attr-defined]
        bad = draft.depth[1] >= 2 if self.ahead else index >= self.at
        logits[1, bad] = float("nan")
        return TargetOutput(logits)


@pytest.mark.parametrize("coupling", KIND_OF_COUPLING)
def test_a_row_of_no_numbers_ends_alone(coupling: str) -> None:
    for tree, sampler in (({}, SAMPLER), (TREE, SAMPLER), ({}, Sampler())):
        drafter = JacobiDrafter(8, coupling, **tree)
        expected = draw(drafter, sampler=sampler)[0]
        outputs, _, canvas = draw(drafter, sampler=sampler, target=Poisoned(at=9))
        assert outputs == [expected[0], expected[1][:9], expected[2]]
        assert canvas.finish_reasons[1] == "error" and isinstance(canvas.errors[1], NumericalError)


def test_no_numbers_ahead_are_no_error() -> None:
    """A draft may lead the target astray, and only what is committed counts; it is counted as a fault."""
    for tree in ({}, TREE):
        outputs, stats, canvas = draw(JacobiDrafter(8, "exact", **tree), target=Poisoned(at=0, ahead=True))
        assert outputs == plain() and canvas.errors == [None] * 3 and stats.draft_faults > 0


def test_a_row_that_ends_at_once_leaves_the_others_alone() -> None:
    """It goes on accepting padding from its first place; nothing is looked up before the image."""
    first = plain()[1][0]
    for init in INITS:
        outputs, _, canvas = draw(JacobiDrafter(8, "exact", init), end=[first])
        assert canvas.finish_reasons[1] == "eos" and outputs[1] == [first]
        for row in (0, 2):
            whole = plain()[row]
            assert outputs[row] == (whole[: whole.index(first) + 1] if first in whole else whole)


REFUSED = [
    ({"window": 0}, "window"),
    ({"window": 129}, "window"),
    ({"window": 2.0}, "window"),
    ({"window": True}, "window"),
    ({"coupling": "maximum"}, "did you mean 'maximal'"),
    ({"init": "edges"}, "did you mean 'edge'"),
    ({"reuse": 0.0}, "reuse: got 0.0; a probability above 0"),
    ({"reuse": 0.5, "coupling": "exact"}, "reuse"),
    ({"front": "4by2"}, "front: got '4by2'; numbers of candidates as 4x2"),
    ({"front": (2, 0)}, "front"),
    ({"front": 5}, "front"),
    ({"front": (65,)}, "at most 64 chains"),
    ({"window": 4, "front": (1, 1, 1, 2)}, "front: .* at most 3 places"),
    ({"front": (2, 2), "reach": 1}, "reach: got 1; 2 to 31"),
    ({"front": (2, 2), "reach": 32}, "reach"),
]


def test_values_outside_their_range_are_refused() -> None:
    for options, message in REFUSED:
        with pytest.raises(InputError, match=message):
            build_accelerator("sjd", **options)


def test_what_does_not_fit_the_image_is_refused() -> None:
    small = ImageGrid(rows=2, columns=3, codebook_size=5)
    with pytest.raises(InputError, match="window: got 7; 1 to 6"):
        draw(JacobiDrafter(7), grid=small)
    with pytest.raises(InputError, match="window: got 37; 1 to 36"):
        JacobiDrafter(37).fit(images())
    for init in ("repeat", "above"):
        with pytest.raises(InputError, match="init"):
            JacobiDrafter(4, init=init).fit(precise())
        with pytest.raises(InputError, match="init"):
            decode(precise(), PROMPTS[:1], JacobiDrafter(4, init=init))
    target = CausalTarget(tiny_lm(vocab=3))
    with pytest.raises(InputError, match="front"):
        JacobiDrafter(4, front=(4,)).fit(target)


def test_likely_drafts_that_stay_save_forwards_and_say_so() -> None:
    """SJD++: no longer exact, unless nothing is likely enough."""
    made = build_accelerator("sjd", reuse=0.1)
    assert made.exactness == "approximate"
    assert draw(JacobiDrafter(8, reuse=1.0))[0] == draw(JacobiDrafter(8))[0]
    redrawn, kept = (draw(JacobiDrafter(8, "fresh", reuse=reuse))[1] for reuse in (None, 0.01))
    assert kept.target_forwards < redrawn.target_forwards


def test_the_default_rule_is_sound_for_what_the_options_propose() -> None:
    rules = {
        "SpeculativeSampling": [{}, {"coupling": "fresh"}, {"coupling": "gumbel"}, {"window": 1}],
        "RecursiveRejection": [TREE, TREE | {"coupling": "gumbel"}],
        "SampleAndMatch": [{"coupling": "exact"}, TREE | {"coupling": "exact"}],
    }
    for rule, cases in rules.items():
        for options in cases:
            accelerator = build_accelerator("sjd", **options)
            assert type(accelerator.rule).__name__ == rule and accelerator.exactness == "exact"
    with pytest.raises(InputError, match="coupled chains"):
        build_accelerator("sjd", acceptance="speculative_sampling", coupling="exact")
    with pytest.raises(InputError, match="without_replacement trees"):
        build_accelerator("sjd", acceptance="speculative_sampling", **TREE)
    assert build_accelerator("sjd", window=1).drafter.kind is DraftKind.IID


@pytest.mark.parametrize("coupling", ["maximal", "fresh", "exact"])
def test_distributions_kept_as_pairs_give_the_tokens_of_distributions_kept_whole(coupling, monkeypatch):
    """The tokens of both are equal, and only where it pays are there pairs."""
    drafter, sampler = JacobiDrafter(4, coupling), Sampler(1.0, top_k=2)
    kept = []
    keep = JacobiSession._keep
    monkeypatch.setattr(
        JacobiSession, "_keep", lambda self, *seen: (keep(self, *seen), kept.append(self.observed.p))[0]
    )
    runs = []
    for pays in (True, False):
        monkeypatch.setattr(SparseDistribution, "pays", lambda *sizes, pays=pays: pays)
        runs.append(checks.sample(checks.image(), drafter, sampler, rows=500)[0])
        assert all(isinstance(distribution, SparseDistribution) is pays for distribution in kept) and kept
        kept.clear()
    assert torch.equal(*runs)
