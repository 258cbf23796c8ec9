"""The caller's default dtype and default device do not change the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.core.sampling import Sampler
from mmspec.heads.layers import MultimodalRotary
from mmspec.methods.ppd.head import PromptTokensConfig
from mmspec.pipelines import MMSpecPipeline
from mmspec.places.policies import Places
from mmspec.targets.thinned import guided_and_even
from mmspec.visual_tokens.tokens import raster
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode
from tests.contracts.test_drafters import REGISTERED
from tests.tiny_models import save_masked
from tests.tiny_models.continuous import folder_of
from tests.tiny_models.llamagen import save_llamagen

DTYPES = (torch.bfloat16, torch.float16, torch.float64)
DRAFTERS = (
    *("none", "copy", "draft_model, without replacement", "eagle", "eagle3", "mtp", "flash"),
    *("dspark, tree", "medusa, sampled", "hydra", "dflash, beside copies", "cjd", "sjd"),
)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check(call: Callable[[], Any], *, on_another_device: bool = True) -> None:
    """The call returns the same under every default; a tensor on the device "meta" raises if it is used."""
    expected = call()
    for dtype in DTYPES:
        with default_dtype(dtype):
            assert call() == expected, dtype
    if on_another_device:
        with torch.device("meta"):
            assert call() == expected


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.every(3)
def test_drafters_draft_the_same(name: str) -> None:
    def call() -> Any:
        run = decode(llama(), PROMPTS, drafter, None, Sampler(0.9, top_p=0.9), max_new_tokens=12, seed=3)
        return run.outputs, run.stats.drafted, run.stats.accepted

    drafter = REGISTERED[name](4, torch.float32)
    check(call)


def progress() -> torch.Tensor:
    """Return the decided shares of long texts."""
    decided = torch.arange(100, device="cpu") < 57
    rows = torch.zeros(3, 100, dtype=torch.long, device="cpu"), decided.expand(3, -1)
    begin = torch.tensor([3, 601, 901], device="cpu")
    logits = rows[0][..., None]
    return Places(rows[0], logits, logits, ~rows[1], torch.ones_like(rows[1]), begin, 1001).progress


def turns() -> tuple[torch.Tensor, ...]:
    """Rotary angles of a head for prompts with images."""
    rotary = MultimodalRotary(16, 1e6, (2, 3, 3), interleaved=True)
    positions = torch.arange(2000, 2012, device="cpu").view(3, 1, 4)
    return rotary(torch.zeros(1, dtype=torch.float32, device="cpu"), positions)


NUMBERS: dict[str, Callable[[], Any]] = {
    "progress": progress,
    "turns": turns,
    "visual tokens that are read": lambda: guided_and_even(WEIGHTS, 700, 0.2),
    "boxes of visual tokens": lambda: raster(7, 9),
    "worth of prompt tokens": lambda: torch.tensor(
        PromptTokensConfig(num_probes=3, hit_rates=[[0.513], [0.37], [0.211]]).worth,
        dtype=torch.float64,
        device="cpu",
    ),
}
WEIGHTS = torch.rand(1000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_computed_of_integers_are_as_precise(name: str) -> None:
    def call() -> Any:
        found = NUMBERS[name]()
        return [(each.dtype, each.tolist()) for each in (found if isinstance(found, tuple) else (found,))]

    check(call)


def image(pipe: Any, **settings: Any) -> Callable[[], Any]:
    def call() -> Any:
        output = pipe(class_labels=[1, 2], seed=4, output_type="latent", **settings)
        assert not output.images.dtype.is_floating_point or output.images.dtype == torch.float32
        return output.images.tolist(), output.stats.rounds

    pipe.set_progress_bar_config(disable=True)
    return call


@pytest.mark.parametrize("accelerator", ["sjd", "gsd", "zipar"])
@pytest.mark.every(2)
def test_images_of_tokens_are_the_same(accelerator: str, tmp_path: Path) -> None:
    folder = save_llamagen(tmp_path / "class", "class")
    check(image(MMSpecPipeline.from_pretrained(folder, accelerator=accelerator)))


@pytest.mark.parametrize("accelerator", ["none", "shared_noise", "draft_model"])
@pytest.mark.every(2)
def test_images_of_continuous_tokens_are_the_same(accelerator: str) -> None:
    given = {"drafter": folder_of("mar")} if accelerator == "draft_model" else {}
    if accelerator == "shared_noise":
        pipe: Any = MMSpecPipeline.from_pretrained(folder_of("nextstep"), accelerator=accelerator)
        pipe.set_progress_bar_config(disable=True)
        check(lambda: pipe("a red ring", seed=4, output_type="latent").images.tolist())
    else:
        pipe = MMSpecPipeline.from_pretrained(folder_of("mar"), accelerator=accelerator, **given)
        check(image(pipe, num_inference_steps=3, last_step_noise=True))


@pytest.mark.parametrize(
    ("kind", "accelerator"),
    [("llada", "threshold"), ("dream", "none"), ("sdar", "freedave")],
)
def test_masked_models_decide_the_same_places(kind: str, accelerator: str, tmp_path: Path) -> None:
    # a tokenizer makes its tensors on the default device, and so does transformers' own generate
    pipe = MMSpecPipeline.from_pretrained(save_masked(kind, tmp_path / kind), accelerator=accelerator)

    def call() -> Any:
        output = pipe("a red circle", max_new_tokens=12, seed=5, temperature=0.8, apply_chat_template=False)
        return output.tokens, output.stats.rounds

    check(call, on_another_device=False)
