"""Set-up of a training leaves the process as it was."""

from __future__ import annotations

import pytest
import torch

from mmspec.training.environment import SUBNORMAL, flush_subnormals


def is_flushed() -> bool:
    return bool(torch.tensor(SUBNORMAL) * 1 == 0)


@pytest.mark.parametrize("before", [False, True])
def test_subnormal_numbers_are_flushed_in_a_training_alone(before: bool) -> None:
    @flush_subnormals()
    def train(fails: bool) -> None:
        assert is_flushed()
        if fails:
            raise RuntimeError

    try:
        if not torch.set_flush_denormal(before):
            pytest.skip("this processor cannot")
        train(False)
        assert is_flushed() is before
        with pytest.raises(RuntimeError):
            train(True)
        assert is_flushed() is before
    finally:
        torch.set_flush_denormal(False)
