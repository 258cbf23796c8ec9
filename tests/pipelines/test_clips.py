"""Clips by next-block prediction: what is decoded is what a plain loop gives, and frames come as they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.errors import InputError
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from tests.models.converted import convert_and_load
from tests.models.next_block import next_block_model
from tests.models.official_layout import GRID, VOCABULARY
from tests.models.parallel_layout import naive_groups, par_state
from tests.tiny_models.llamagen import STRIDE, tiny_vq

FRAMES, SCALE = 2, 2.5
CELLS = FRAMES * GRID * GRID
ASKED: dict[str, Any] = {
    "class_labels": [0, 3],
    "seed": [11, 4],
    "guidance_scale": SCALE,
    "top_k": 0,
    "top_p": 1.0,
}


def pipeline(folder: Path, block_size: int, frames: int = FRAMES) -> tuple[dict[str, Tensor], Any]:
    """A pipeline in double precision, and the official names of its weights."""
    state = par_state(regions=block_size)
    model = next_block_model(convert_and_load(folder, state, dtype=torch.float64), frames)
    pipe = ImagePipeline(model, vq=tiny_vq(codes=VOCABULARY))
    pipe.set_progress_bar_config(disable=True)
    return state, pipe


@pytest.mark.parametrize(
    ("block_size", "temperature"), [(1, 1.0), (GRID, 1.0), (GRID, 0.0), (GRID * GRID, 1.0)]
)
def test_a_clip_is_a_plain_loop_over_blocks(tmp_path: Path, block_size: int, temperature: float) -> None:
    """Blocks of one token are plain autoregression."""
    state, pipe = pipeline(tmp_path, block_size)
    output = pipe(**ASKED, temperature=temperature, output_type="latent")
    assert output.stats.nfe == [block_size + (CELLS - block_size) // block_size] * 2
    assert output.stats.exactness == "exact"
    for row, (label, seed) in enumerate(zip(ASKED["class_labels"], ASKED["seed"], strict=True)):
        noise = RandomStream.from_seed([seed], 1)

        def choose(cell: int, logits: Tensor, noise: RandomStream = noise) -> int:
            drawn = noise.gumbel(torch.tensor([[cell]]), Purpose.TARGET, len(logits), torch.float64)[0, 0]
            return int((logits + drawn * temperature).argmax())

        assert output.tokens[row] == naive_groups(state, label, range(CELLS), block_size, SCALE, choose)


def test_a_folder_draws_clips_whose_frames_can_be_streamed(tmp_path: Path) -> None:
    _, made = pipeline(tmp_path, GRID, frames=3)
    made.to(torch.float32).save_pretrained(tmp_path / "clips")  # fits the model's own order again
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
    # four tokens of the first row, then row after row, of three frames of four
    assert whole == [0] * 6 + [1] * 4 + [2] * 4 + [3]
    for row, clip in enumerate(output.frames):
        assert [frame.size for frame in clip] == [(side, side)] * 3
        for index, frame in enumerate(clip):
            assert frame.tobytes() == streamed[index][row].tobytes()
    codes = pipe(**ASKED, output_type="latent").frames
    assert codes.shape == (2, 3, GRID, GRID)
    alone = pipe.target.decode(codes[0])  # frame by frame: no pixel of one knows of another
    tensor, array = (pipe(**ASKED, output_type=kind).frames for kind in ("pt", "np"))
    torch.testing.assert_close(tensor[0], alone.clamp(-1, 1) / 2 + 0.5)
    assert np.array_equal(array, tensor.permute(0, 1, 3, 4, 2).numpy())
