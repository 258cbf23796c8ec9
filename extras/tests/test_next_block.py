"""NBP in mmspec's tests of targets that decide several cells together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from extras.tests.next_block import next_block_model
from mmspec.families.images import image_target
from mmspec.plugins import family_of
from mmspec_extras.families.ctf.modeling import CTFConfig
from mmspec_extras.families.nbp.modeling import NBPConfig
from mmspec_extras.families.nfig.modeling import NFIGConfig
from tests.families import test_parallel_images
from tests.families.converted import convert_and_load


@pytest.fixture
def targets(tmp_path: Path) -> dict[str, Any]:
    model = convert_and_load(tmp_path, test_parallel_images.STATES["par"], dtype=torch.float64)
    return {"nbp": image_target(next_block_model(model))}


def test_an_image_does_not_depend_on_its_batch(targets: dict[str, Any]) -> None:
    images = test_parallel_images.images
    together, _ = images(targets["nbp"])
    assert images(targets["nbp"], "none", (2, 0))[0] == [together[2], together[0]]
    for row in range(3):
        assert images(targets["nbp"], "none", (row,))[0] == [together[row]]


def test_a_cell_sees_all_that_was_decided_before_and_nothing_else(
    targets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = test_parallel_images.test_a_cell_sees_all_that_was_decided_before_and_nothing_else
    check(targets, "nbp", "none", {}, monkeypatch)


@pytest.mark.parametrize("config", [CTFConfig, NBPConfig, NFIGConfig])
def test_families_are_found_by_their_configs(config: Any) -> None:
    family = family_of(config())
    assert family is not None and family.draws == "tokens" and family.name == config.model_type
