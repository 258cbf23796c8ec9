"""A pipeline's own call reaches the sampling kernels, and gives what it gives without them."""

from __future__ import annotations

from typing import Any

import pytest

from mmspec import MMSpecPipeline
from tests.packaging.source_tree import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["none", "draft_model"])
def test_a_caption_is_sampled_by_the_kernels(monkeypatch: pytest.MonkeyPatch, accelerator: str) -> None:
    module = pytest.importorskip("mmspec.kernels.sampling_triton")
    draft = {"drafter": str(ROOT / "assets/scenes-llava-small")} if accelerator == "draft_model" else {}
    pipe: Any = MMSpecPipeline.from_pretrained(ROOT / "assets/scenes-llava", accelerator=accelerator, **draft)
    image = next((ROOT / "assets/images").glob("*.png"))
    calls: list[Any] = []
    real = module.sample_triton
    monkeypatch.setattr(module, "sample_triton", lambda *given: calls.append(given) or real(*given))

    def caption(backend: str) -> str:
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
        settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "do_sample": True}
        output = pipe("Describe the image.", images=str(image), max_new_tokens=3, seed=1, **settings)
        return str(output.text)

    assert caption("torch") == caption("triton") and calls
