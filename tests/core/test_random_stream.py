"""Random numbers are keyed by row, place and purpose."""

from __future__ import annotations

import pytest
import torch

from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.errors import InputError


def test_rows_do_not_depend_on_their_neighbours_or_order() -> None:
    stream, position = RandomStream.from_seed(9, 5), torch.arange(15).view(5, 3)
    together = stream.uniform(position, Purpose.TARGET, 7, torch.float64)
    for order in ([3], [4, 0, 2]):
        part = RandomStream(stream.keys[order]).uniform(position[order], Purpose.TARGET, 7, torch.float64)
        assert torch.equal(part, together[order])


def test_a_place_has_the_same_number_whenever_it_is_asked() -> None:
    stream = RandomStream.from_seed(9, 2)
    long = stream.gumbel(torch.arange(20).expand(2, 20), Purpose.DRAFT, 5, torch.float64)
    late = stream.gumbel(torch.full((2, 1), 13), Purpose.DRAFT, 5, torch.float64)
    assert torch.equal(late[:, 0], long[:, 13])


def test_streams_of_different_purpose_seed_and_row_are_uncorrelated() -> None:
    position = torch.arange(10_000)[None]
    series = [
        RandomStream.from_seed(seed, 2).uniform(position.expand(2, -1), purpose, 4, torch.float64).reshape(-1)
        for seed in (0, 1)
        for purpose in (Purpose.TARGET, Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL)
    ]
    rho = torch.corrcoef(
        torch.stack([part[half] for part in series for half in (slice(40_000), slice(40_000, None))])
    )
    assert (rho - torch.eye(len(rho))).abs().max() < 0.02  # four sigma of 40,000 numbers


def test_a_list_of_seeds_gives_the_first_row_of_each() -> None:
    keys = RandomStream.from_seed([3, 5], 2).keys
    assert torch.equal(keys[0], RandomStream.from_seed(3, 4).keys[0])
    assert torch.equal(keys[1], RandomStream.from_seed(5, 1).keys[0])


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, [1], [1, None]])
def test_a_seed_that_is_none_is_refused_by_name(seed: object) -> None:
    with pytest.raises(InputError) as caught:
        RandomStream.from_seed(seed, 2)  # type: ignore[arg-type]
    assert caught.value.argument == "seed"
