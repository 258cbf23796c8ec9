"""First differences, and which of them half precision explains."""

import math

import pytest
import torch

from mmspec.decoding.stats import DecodingStats
from mmspec.evaluation.identity.comparison import compare, first_difference, ulp


def test_first_difference():
    for expected, got, position in [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 2], 1),
        ([], [1], 0),
    ]:
        assert first_difference(expected, got) == position


def test_ulp_is_the_distance_to_the_neighbour():
    for value in [1.0, 1.5, 9.3, -100.0, 0.3]:
        for dtype in [torch.float32, torch.bfloat16, torch.float16]:
            number = torch.tensor(abs(value), dtype=dtype)
            following = torch.nextafter(number.double(), torch.tensor(math.inf, dtype=torch.float64))
            while following.to(dtype) == number:
                following = following + ulp(value, dtype) / 4
            assert (following.to(dtype) - number).double().item() == ulp(value, dtype)


def judge(gap, magnitude, dtype, expected=(1, 2), got=(1, 3), is_recurrent=False):
    best = [[(9.0, 1.0, 9.0), (magnitude, magnitude - gap, magnitude)]]
    return compare("greedy", "x", [list(expected)], [list(got)], best, dtype, DecodingStats(), is_recurrent)


def test_only_a_near_tie_in_half_precision_is_explained():
    for gap, dtype, explained in [
        (0.0, torch.bfloat16, True),
        (0.125, torch.bfloat16, True),  # 2 ulp of 8 to 16
        (0.1875, torch.bfloat16, False),
        (2**-6, torch.float16, True),
        (2**-5, torch.float16, False),
        (0.0, torch.float32, False),  # in float32 every difference counts
    ]:
        comparison = judge(gap, 9.0, dtype)
        (difference,) = comparison.differences
        assert difference.position == 1
        assert (difference.expected, difference.got) == (2, 3)
        assert difference.gap == pytest.approx(gap)
        assert difference.explained is explained
        assert comparison.passed is explained
        assert comparison.equal == 0


def test_recurrent_layers_round_further_apart():
    for gap, dtype, explained in [
        (0.5, torch.bfloat16, True),  # 8 ulp of 8 to 16
        (0.5625, torch.bfloat16, False),
        (2**-13, torch.float32, True),  # 128 ulp
        (2**-12, torch.float32, False),
    ]:
        assert judge(gap, 9.0, dtype, is_recurrent=True).passed is explained


def test_an_output_that_goes_on_is_never_explained():
    comparison = judge(0.0, 9.0, torch.bfloat16, expected=(1, 2), got=(1, 2, 3))
    (difference,) = comparison.differences
    assert (difference.expected, difference.got) == (None, 3)
    assert not comparison.passed


def test_equal_outputs_pass():
    comparison = judge(0.0, 9.0, torch.float32, got=(1, 2))
    assert comparison.passed
    assert (comparison.equal, comparison.tokens) == (1, 2)
