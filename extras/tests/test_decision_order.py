"""AR-ness of known orders, and of runs of the loop."""

from __future__ import annotations

import random

import pytest

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.decoder import Decoder
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.places.sequential import Sequential
from mmspec_extras.decision_order import decision_order, global_ar_ness, local_ar_ness
from tests.contracts.running import as_request
from tests.tiny_models import tiny_llada


def test_orders_that_are_known() -> None:
    forwards, backwards = [*range(8)], [*range(7, -1, -1)]
    for k in (1, 2, 4):
        assert local_ar_ness(forwards, k) == global_ar_ness(forwards, k) == 1.0
    assert local_ar_ness(backwards, 2) == 0.0 and global_ar_ness(backwards, 1) == 1 / 8
    assert local_ar_ness([0, 1, 3, 2], 2) == 1 / 3 and global_ar_ness([1, 0, 2, 3], 1) == 3 / 4
    for k in (0, 1.5):
        with pytest.raises(InputError, match="k"):
            local_ar_ness(forwards, k)  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [1, 3])
def test_random_orders_have_the_expected_share(k: int) -> None:
    """The expected value is (k / n) (1 + H_n - H_k)."""
    rng, n, many = random.Random(0), 12, 3000
    expected = k / n * (1 + sum(1 / one for one in range(k + 1, n + 1)))
    found = [global_ar_ness(rng.sample(range(n), n), k) for _ in range(many)]
    assert abs(sum(found) / many - expected) < 0.01


def test_the_order_of_a_run() -> None:
    target, prompts = MaskedTarget(tiny_llada(32)), [[3, 1, 4], [9, 2]]
    drafter, stopping = UnmaskingDrafter().fit(target), Stopping(7)
    canvas = Canvas(prompts, stopping, DecodingStats("sequential", "lossy"), target.device)
    requests, stream = [as_request(prompt) for prompt in prompts], RandomStream.from_seed(0, 2)
    rounds = speculate(target, Decoder(drafter, Sequential()), Sampler(), requests, canvas, stream)
    assert decision_order(rounds) == [[*range(7)], [*range(7)]]
