"""The Jacobi drafter: its distribution, its identity with plain decoding, its forwards, its refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmspec.accelerator import default_rule
from mmspec.accelerators import build_accelerator
from mmspec.core import distributions
from mmspec.core.distributions import Pairs
from mmspec.core.draft import Draft
from mmspec.core.image_grid import FREE, ImageGrid
from mmspec.core.interfaces import PromptOutput, Request, TargetOutput
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError, NumericalError
from mmspec.kernels.redraw import invert
from mmspec.targets.causal import CausalState
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.jacobi_session import INITS, JacobiSession
from mmspec.trees.window import WindowLayout, WindowTree
from tests.contracts.checks import check_words
from tests.contracts.distributions import ALARM, chi_square, reference_distribution
from tests.contracts.running import FanOutTarget, canvas_of
from tests.core.test_rounds import counted_reads
from tests.tiny_models import tiny_lm, tiny_lm_v8
from tests.trees.jacobi_checks import (
    CELLS,
    GRID,
    SAMPLER,
    ImageTable,
    ToyImages,
    draw,
    image,
    images,
    plain,
    sample,
)
from tests.trees.jacobi_checks import PROMPTS as PAIR

TREE: dict[str, Any] = {"front": (4, 2), "reach": 3}


def check_distribution(drafter: JacobiDrafter, sampler: Sampler, rows: int = 20_000) -> None:
    """All 625 images come as often as the table says, in between N / W and N forwards."""
    target = image(tables=2)
    joint = target.joint(
        PAIR[: 1 + sampler.is_guided], CELLS.length, lambda logits: reference_distribution(logits, sampler)
    )
    run = sample(target, drafter, sampler, rows)
    cells = torch.tensor(run.outputs) @ 6 ** torch.arange(CELLS.length - 1, -1, -1)
    fit = chi_square(torch.bincount(cells, minlength=joint.numel()), joint.flatten())
    assert fit.p_value > ALARM, fit
    assert -(-CELLS.length // drafter.window) <= min(run.stats.nfe) <= max(run.stats.nfe) <= CELLS.length


DISTRIBUTIONS = {
    "maximal, 4": (JacobiDrafter(4), Sampler(1.0), 40_000),
    "fresh, 4, top-k": (JacobiDrafter(4, "fresh", "uniform"), Sampler(1.0, top_k=3)),
    "maximal, 2, top-p": (JacobiDrafter(2, "maximal", "above"), Sampler(0.8, top_p=0.8)),
    "maximal, 4, guided": (JacobiDrafter(4), Sampler(1.0, guidance_scale=3.0)),
    "gumbel, 4, hot": (JacobiDrafter(4, "gumbel", "repeat"), Sampler(1.4, min_p=0.05)),
    "maximal, tree": (JacobiDrafter(4, front="3x2x2"), Sampler(1.0)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@torch.inference_mode()
@pytest.mark.every(6)
def test_images_follow_the_targets_distribution(name: str) -> None:
    check_distribution(*DISTRIBUTIONS[name])


@torch.inference_mode()
def test_tokens_of_a_transformer_follow_its_distribution() -> None:
    drafter = JacobiDrafter(3, front="3x3", reach=2)
    check_words(FanOutTarget(tiny_lm_v8()), drafter, default_rule(drafter), Sampler(1.0, top_k=4), 8_000)


def test_inversion_draws_every_token_with_its_own_probability() -> None:
    """On an even grid of uniforms the shares are the probabilities; what has none is never drawn."""
    p = torch.tensor([0.0, 0.125, 0.0, 0.5, 0.375, 0.0]).expand(1, 800, 6)
    u = torch.stack([(torch.arange(800) + 0.5) / 800, torch.full((800,), 0.5)], -1).double()[None]
    assert torch.bincount(invert(p, u)[0], minlength=6).tolist() == [0, 100, 0, 400, 300, 0]
    edges = torch.tensor([[[2**-25, 2**-25], [1 - 2**-25, 1 - 2**-25]]], dtype=torch.float64)
    assert invert(p[:, :2], edges).tolist() == [[1, 4]]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.every(2)
def test_every_init_gives_the_images_of_plain_decoding(init: str) -> None:
    """Greedy with any coupling, and bitwise with the target's own noise, which saves forwards."""
    for window in (1, 32):
        outputs, stats, _ = draw(JacobiDrafter(window, "exact", init))
        assert outputs == plain(), window
        assert window == 1 or stats.target_forwards < GRID.length
    for coupling in ("fresh", "maximal"):
        assert draw(JacobiDrafter(8, coupling, init), sampler=Sampler())[0] == plain(Sampler()), coupling


def window_on(device: str, **options: Any) -> int:
    """The window for a target of text on a device."""
    target: Any = SimpleNamespace(device=torch.device(device), grid=None, vocabulary=64)
    return JacobiDrafter(**options).fit(target).window


def test_a_window_that_nobody_chose_is_smaller_on_a_cpu() -> None:
    """It is the same for every number of rows: what is drawn depends on it."""
    assert window_on("cpu") == 16 and window_on("cuda") == 32
    assert {JacobiDrafter().fit(images()).width(rows) for rows in (1, 8, 64)} == {16}
    assert window_on("cpu", window=32) == window_on("cpu", front="2x2") == window_on("cpu", reach=20) == 32
    moved = JacobiDrafter().fit(images())
    assert moved.fit(SimpleNamespace(device=torch.device("cuda"), grid=None, vocabulary=64)).window == 32


def test_rows_share_the_nodes_of_a_cpu_where_no_token_depends_on_the_window() -> None:
    drafter = JacobiDrafter(coupling="exact").fit(images())
    assert [drafter.width(rows) for rows in (1, 2, 3, 8, 9, 64)] == [32, 16, 10, 4, 1, 1]
    assert JacobiDrafter(16, "exact").fit(images()).width(8) == window_on("cuda", coupling="exact") // 2 == 16
    guided = replace(SAMPLER, guidance_scale=1.5)
    for sampler, copies in ((SAMPLER, 1), (guided, 2)):
        for rows in ((0,), (0, 1, 2)):
            outputs, stats, _ = draw(drafter, rows, sampler)
            assert outputs == [plain(sampler)[row] for row in rows]
            assert stats.target_forwards < GRID.length
            width = 32 // (copies * len(rows))
            assert max(stats.drafted) <= (width - 1) * (stats.target_forwards - 1)


def test_images_of_several_sizes_share_a_batch() -> None:
    """Each row has its own places, grammar and neighbours."""
    small = ImageGrid(rows=3, columns=2, codebook_size=62, row_end=62, ending=(63,))
    for init in INITS:
        drafter = JacobiDrafter(8, init=init)
        sessions = []
        for grids in ([GRID, small], [GRID], [small]):
            requests = [Request({"input_ids": torch.tensor([[1, 2]])}, layout=grid) for grid in grids]
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


def flat_target(sensitivity: float = 0.43) -> ImageTable:
    """Flat distributions of 64 codes, 8 x 16 cells, a total variation of 0.24 between contexts."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(64, generator=generator)
    own = torch.randn(1, 64, 64, 64, generator=generator)
    return ImageTable(shared + sensitivity * own, ImageGrid(rows=8, columns=16, codebook_size=64))


def mean_forwards(drafter: JacobiDrafter, rows: int = 64) -> float:
    return sample(flat_target(), drafter, Sampler(1.0), rows).stats.nfe_mean


@torch.inference_mode()
@pytest.mark.slow
def test_coupled_drafts_save_forwards() -> None:
    """Dossier 15: SJD 30.7, MC 15.3, GS 15.9, Gumbel-exact 17.2; 64 rows come within a tenth."""
    due = {"fresh": 30.7, "maximal": 15.3, "gumbel": 15.9, "exact": 17.2}
    mean = {coupling: mean_forwards(JacobiDrafter(32, coupling)) for coupling in due}
    assert all(abs(mean[coupling] / due[coupling] - 1) < 0.1 for coupling in due), mean
    assert mean["maximal"] <= mean_forwards(JacobiDrafter(32, init="above"))
    siblings = mean_forwards(JacobiDrafter(32, **TREE))
    assert mean_forwards(JacobiDrafter(32, front=TREE["front"])) <= siblings < mean["maximal"]


def test_neighbours_are_the_nearest_covered_cells() -> None:
    """Against a walk over the image, with and without row ends, from every place."""
    for grid in (ImageGrid(3, 4, 9, row_end=9, ending=(10,)), ImageGrid(3, 4, 9)):
        layout = WindowLayout([grid], 11, torch.device("cpu"))
        cells = [index for index, token in enumerate(grid.forced) if token == FREE]
        for first in range(2, grid.length):
            place = torch.arange(first - 1, grid.length)[None]
            start = torch.tensor([[first]])
            left, above = layout.left(place, start)[0].tolist(), layout.above(place, start)[0].tolist()
            before = max(cell for cell in cells if cell < first)
            for index, at in enumerate(place[0].tolist()):
                upper = at - grid.stride
                while upper >= first:
                    upper -= grid.stride
                assert left[index] == before
                assert at < first or above[index] == (upper if upper >= 0 else before)


@pytest.mark.parametrize("init", ["edge", "above"])
def test_proposing_reads_nothing_from_the_device(init: str) -> None:
    for coupling, tree in (("maximal", {}), ("exact", TREE)):
        drafter = JacobiDrafter(8, coupling, init, **tree)
        requests = [Request({"input_ids": torch.tensor([[1, 2]])}, layout=GRID)]
        random = RandomStream.from_seed(0, 1)
        session = drafter.start(requests, PromptOutput(torch.randn(1, 1, 64)), SAMPLER, random)
        canvas = canvas_of([[1, 2, 5]], emitted=1)
        with counted_reads() as reads:
            for _ in range(2):
                draft = session.propose(canvas)
                scores = SAMPLER(torch.zeros(1, drafter.max_nodes, 64), draft, canvas.history, canvas.emitted)
                verdict = default_rule(drafter).verify(draft, scores, random, canvas.emitted)
                session.observe(draft, TargetOutput(scores.logits), scores, verdict)
        assert not reads


class Poisoned(ToyImages):
    """Row 1 has NaN for the token at output index `at`; or, `ahead`, for all from two places on."""

    def __init__(self, at: int, ahead: bool = False) -> None:
        super().__init__(tiny_lm(), GRID)
        self.at, self.ahead = at, ahead

    def score(self, state: CausalState, draft: Draft) -> TargetOutput:
        logits = super().score(state, draft).logits.clone()  # type: ignore[arg-type]
        index = (state.cache.lengths - state.starts)[1] + draft.depth[1] + 1
        bad = draft.depth[1] >= 2 if self.ahead else index >= self.at
        logits[1, bad] = float("nan")
        return TargetOutput(logits)


@pytest.mark.parametrize("coupling", ["maximal", "exact"])
def test_a_row_of_no_numbers_ends_alone(coupling: str) -> None:
    for tree, sampler in ((TREE, SAMPLER), ({}, Sampler())):
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


def test_likely_drafts_that_stay_save_forwards_and_say_so() -> None:
    """SJD++: no longer exact, unless nothing is likely enough."""
    made = build_accelerator("sjd", reuse=0.1)
    assert made.exactness == "approximate"
    assert draw(JacobiDrafter(8, reuse=1.0))[0] == draw(JacobiDrafter(8))[0]
    redrawn, kept = (draw(JacobiDrafter(8, "fresh", reuse=reuse))[1] for reuse in (None, 0.01))
    assert kept.target_forwards < redrawn.target_forwards


def test_the_default_rule_is_sound_for_what_the_options_propose() -> None:
    rules = {"SpeculativeSampling": {}, "RecursiveRejection": TREE, "SampleAndMatch": {"coupling": "exact"}}
    for rule, options in rules.items():
        accelerator = build_accelerator("sjd", **options)
        assert type(accelerator.rule).__name__ == rule and accelerator.exactness == "exact"
    for options, named in (
        ({"coupling": "exact"}, "chains of candidates drawn with the target's noise"),
        (TREE, "trees of candidates sampled without replacement"),
    ):
        with pytest.raises(InputError, match=named):
            build_accelerator("sjd", acceptance="speculative_sampling", **options)


@pytest.mark.parametrize("coupling", ["maximal", "exact"])
def test_distributions_kept_as_pairs_give_the_tokens_of_distributions_kept_whole(coupling, monkeypatch):
    """The tokens of both are equal, and only where it pays are there pairs."""
    drafter, sampler = JacobiDrafter(4, coupling), Sampler(1.0, top_k=2)
    kept = []
    keep = JacobiSession._keep
    monkeypatch.setattr(
        JacobiSession, "_keep", lambda self, *seen: (keep(self, *seen), kept.append(self.observed))[0]
    )
    runs = []
    for pays in (True, False):
        monkeypatch.setattr(distributions, "TOKEN_BYTES", 0 if pays else 100)
        runs.append(sample(image(), drafter, sampler, rows=500).outputs)
        assert all(isinstance(seen.p, Pairs) is pays for seen in kept) and kept
        assert coupling == "exact" or all(isinstance(seen.draft.q, Pairs) is pays for seen in kept)
        kept.clear()
    assert runs[0] == runs[1]


def test_each_chain_goes_to_the_end_of_the_window() -> None:
    tree = WindowTree(5, (2, 3))
    assert tree.parents == [0, 0, 0, 1, 1, 1, 2, 2, 2, *range(3, 15)]
    assert tree.slots == [0, 1, 1, *[2] * 6, *[3] * 6, *[4] * 6]
    assert tree.nodes[0] == [0, 1, 3, 9, 15] and tree.nodes[5] == [0, 2, 8, 14, 20]
    assert tree.chain[:9] == [0, 0, 3, 0, 1, 2, 3, 4, 5]


def test_behind_the_reach_the_first_chain_stands_for_all() -> None:
    tree = WindowTree(6, (2, 2), reach=3)
    assert tree.parents == [0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 11]
    assert tree.nodes[3] == [0, 2, 6, 10, 11, 12] and tree.chain[11:] == [0, 0]
    assert [tree.chains(slot) for slot in range(1, 6)] == [1, 2, 4, 1, 1]
