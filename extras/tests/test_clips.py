"""Clips by next-block prediction: decoding equals a plain loop, and frames are available once complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.errors import InputError
from mmspec.evaluation.contenders import contender, image_examples
from mmspec.families.images import image_target
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from mmspec.plugins import family_of
from mmspec_extras.families.ctf.modeling import CTFConfig
from mmspec_extras.families.nbp.modeling import NBPConfig, NBPForCausalLM
from mmspec_extras.families.nfig.modeling import NFIGConfig
from tests.families import test_parallel_images
from tests.families.converted import convert_and_load
from tests.families.official_layout import GRID, VOCABULARY
from tests.families.parallel_layout import naive_groups, par_state
from tests.tiny_models.llamagen import STRIDE, tiny_vq

FRAMES, SCALE = 2, 2.5
CELLS = FRAMES * GRID * GRID
BLOCKS = FRAMES * GRID
ASKED: dict[str, Any] = {
    "class_labels": [0, 3],
    "seed": [11, 4],
    "guidance_scale": SCALE,
    "top_k": 0,
    "top_p": 1.0,
}


def next_block_model(par: Any, frames: int = 1) -> NBPForCausalLM:
    """Return a model of clips with a PAR's weights; a block has as many tokens as the PAR has regions."""
    shape = par.config.to_dict()
    block_size = shape.pop("regions")
    for name in ("model_type", "architectures"):
        shape.pop(name)
    model = NBPForCausalLM(NBPConfig(frames=frames, block_size=block_size, **shape))
    model.load_state_dict(par.state_dict())
    return model.to(par.dtype).eval()


def pipeline(folder: Path, block_size: int, frames: int = FRAMES) -> tuple[dict[str, Tensor], Any]:
    """A pipeline in double precision, and the official names of its weights."""
    state = par_state(regions=block_size)
    model = next_block_model(convert_and_load(folder, state, dtype=torch.float64), frames)
    pipe = ImagePipeline(model, vq=tiny_vq(codes=VOCABULARY))
    pipe.set_progress_bar_config(disable=True)
    return state, pipe


def naive(
    state: dict[str, Tensor], row: int, block_size: int, heat: float, cells: int, **more: Any
) -> list[int]:
    """The clip of a row of `ASKED`, decoded by a loop without a cache."""
    noise = RandomStream.from_seed([ASKED["seed"][row]], 1)

    def choose(cell: int, logits: Tensor) -> int:
        drawn = noise.gumbel(torch.tensor([[cell]]), Purpose.TARGET, len(logits), torch.float64)[0, 0]
        return int((logits + drawn * heat).argmax())

    label = ASKED["class_labels"][row]
    return naive_groups(state, label, range(cells), block_size, SCALE, choose, **more)


@pytest.mark.parametrize(("block_size", "frames"), [(1, 1), (GRID, 2), (GRID * GRID, 2)])
def test_a_clip_is_a_plain_loop_over_blocks(tmp_path: Path, block_size: int, frames: int) -> None:
    """Blocks of one token are plain autoregression. One clip is sampled, the other greedy."""
    state, pipe = pipeline(tmp_path, block_size, frames)
    cells = frames * GRID * GRID
    output = pipe(**ASKED, temperature=[1.0, 0.0], output_type="latent")
    assert output.stats.nfe == [block_size + (cells - block_size) // block_size] * 2
    assert output.stats.exactness == "exact"
    for row, heat in enumerate((1.0, 0.0)):
        assert output.tokens[row] == naive(state, row, block_size, heat, cells)


def test_a_sparse_context_keeps_the_first_block_and_the_newest(tmp_path: Path) -> None:
    state, pipe = pipeline(tmp_path, GRID)
    asked = {**ASKED, "output_type": "latent"}
    scored, whole = list[tuple[int, Tensor]](), pipe.target.score_nodes

    def score(state: Any, nodes: Any) -> Any:
        output = whole(state, nodes)
        scored.append((nodes.extent, output.logits))
        return output

    pipe.target.score_nodes = score
    plain = pipe(**asked).tokens
    kept = [logits for _, logits in scored]
    for count in (BLOCKS - 1, BLOCKS + 5):  # all but the first block, and more than exist
        scored.clear()
        pipe.set_accelerator("sparse_context", context_blocks=count)
        assert pipe(**asked).tokens == plain
        assert all(torch.equal(logits, own) for (_, logits), own in zip(scored, kept, strict=True))
    scored.clear()
    pipe.set_accelerator("sparse_context", context_blocks=2)
    output = pipe(**asked)
    assert output.stats.exactness == "lossy" and output.tokens != plain
    assert output.tokens == [naive(state, row, GRID, 1.0, CELLS, recent=2) for row in range(2)]
    # three blocks, an unused slot, and the special tokens
    assert {extent for extent, _ in scored} == {3 * GRID + 1 + GRID - 1}
    # no distribution to measure against, token by token
    assert contender(pipe, "sparse_context").watch([image_examples(pipe, 1)]) == {}
    with pytest.raises(InputError, match="context_blocks"):
        pipe.set_accelerator("sparse_context", context_blocks=0)


def test_a_folder_draws_clips_whose_frames_can_be_streamed(tmp_path: Path) -> None:
    _, made = pipeline(tmp_path, GRID, frames=3)
    made.to(torch.float32).save_pretrained(tmp_path / "clips")  # selects the model's own order again
    pipe: Any = MMSpecPipeline.from_pretrained(tmp_path / "clips")
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe, ImagePipeline) and pipe.accelerator.name == "none"
    side, whole, streamed = GRID * STRIDE, list[int](), list[Any]()

    def look(pipe: Any, step: int, committed: int, kwargs: dict[str, Any]) -> None:
        whole.append(kwargs["frames"])
        if kwargs["frames"] > len(streamed):
            streamed.append(kwargs["preview"](frame=len(streamed)))
            with pytest.raises(InputError, match="frame"):
                kwargs["preview"](frame=3)

    output = pipe(**ASKED, height=side, width=side, callback_on_step_end=look)
    assert str(output).startswith("2 clips")
    # four tokens of the first row, then row by row, for three frames of four rows
    assert whole == [0] * 6 + [1] * 4 + [2] * 4 + [3]
    for row, clip in enumerate(output.frames):
        assert [frame.size for frame in clip] == [(side, side)] * 3
        for index, frame in enumerate(clip):
            assert frame.tobytes() == streamed[index][row].tobytes()
    codes = pipe(**ASKED, output_type="latent").frames
    assert codes.shape == (2, 3, GRID, GRID)
    alone = VaeImageProcessor().postprocess(pipe.target.decode(codes[0]).clamp(-1, 1))
    for one, frame in zip(alone, output.frames[0], strict=True):  # frames are decoded independently
        assert np.abs(np.asarray(one).astype(int) - np.asarray(frame)).max() <= 1
    array = np.stack([np.asarray(strip) for strip in output.images])
    cut = replace(output, images=array).frames
    assert np.array_equal(cut[1, 2], np.asarray(output.frames[1][2]))
    tensor = replace(output, images=torch.from_numpy(array).permute(0, 3, 1, 2)).frames
    assert np.array_equal(tensor.permute(0, 1, 3, 4, 2).numpy(), cut)


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
