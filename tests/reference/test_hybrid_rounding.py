"""Two forms of a recurrence differ by rounding only as much as `mmspec check` allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mmspec.evaluation.identity.comparison import explained_ulp
from mmspec.transformers_versions import CACHE

ASSETS = Path(__file__).parents[2] / "assets"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.every(2)
def test_chunks_and_single_steps_differ_by_no_more_than_is_explained(dtype: torch.dtype) -> None:
    """`pytest -s` prints the differences."""
    model = AutoModelForImageTextToText.from_pretrained(ASSETS / "scenes-hybrid", dtype=dtype).eval()
    tokens = torch.randint(5, 200, (4, 192), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        at_once = model(input_ids=tokens).logits.float()
        steps, cache = [], None
        for token in tokens.split(1, dim=1):
            output = model(input_ids=token, **{CACHE: cache}, use_cache=True)
            cache = getattr(output, CACHE)
            steps.append(output.logits.float())
    units = torch.finfo(dtype).eps * at_once.abs().amax(-1).log2().floor().exp2()
    apart = (at_once - torch.cat(steps, 1)).abs().amax(-1) / units
    print(f"{dtype}: {apart.max():.0f} ulp at most, {apart.median():.1f} in the median")
    assert 1 < float(apart.max()) <= explained_ulp(dtype, is_recurrent=True)
