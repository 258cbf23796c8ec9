"""Images by OpenAI's own client, against a real server."""

import base64
import io

import numpy as np
import openai
import pytest
from PIL import Image

from mmspec.cli.options import ModelOptions
from mmspec.cli.serve import load_engine
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import Metrics
from tests.serving.conftest import reference, running, without_moves
from tests.tiny_models.llamagen import save_llamagen

PROMPT = "a red ring left of a small blue cross"


def pixels(datum) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(datum.b64_json))))


def generate(server, **settings: object):
    what = {"model": "scenes-llamagen", "prompt": PROMPT, "response_format": "b64_json", **settings}
    return server.client.images.generate(**what)


@pytest.mark.slow
def test_images_are_those_of_the_pipeline_in_a_batch_and_in_turn(server):
    pipe = reference("scenes-llamagen")
    expected = pipe(PROMPT, num_images_per_prompt=2, seed=[3, 4], guidance_scale=2.0)
    size = "{}x{}".format(*expected.images[0].size)
    asked = {"n": 2, "size": size, "extra_body": {"seed": 3, "guidance_scale": 2.0}}
    batched = generate(server, **asked)
    with without_moves(pipe), running(pipelines={"scenes-llamagen": pipe}) as other:
        in_turn = generate(other, **{**asked, "n": 1})
    first, second = map(pixels, batched.data)
    assert (first == np.asarray(expected.images[0])).all() and (
        second == np.asarray(expected.images[1])
    ).all()
    assert (first != second).any() and (pixels(in_turn.data[0]) == first).all()
    assert batched.size == in_turn.size == size
    assert batched.usage.output_tokens == sum(expected.stats.new_tokens) == 2 * in_turn.usage.output_tokens


def test_a_server_that_is_told_nothing_draws_by_windows_that_follow_its_rows(tmp_path) -> None:
    """Images are those of plain decoding with their seeds, however many rows are at work."""
    limits, metrics, how = ServerLimits(), Metrics(), ModelOptions(device="cpu")
    source = str(save_llamagen(tmp_path / "drawing", "class"))
    drafter = load_engine(source, None, 8, limits, metrics, how).pipeline.accelerator.drafter
    assert drafter.coupling == "exact" and [drafter.width(rows) for rows in (1, 8, 16)] == [32, 4, 1]
    asked = load_engine(source, "sjd", 8, limits, metrics, how).pipeline.accelerator.drafter
    assert asked.coupling == "maximal" and asked.window == 16


WRONG = [
    ({"size": "512x512"}, "size"),
    ({"size": "large"}, "size"),
    ({"size": "1e9x1"}, "size"),
    ({"n": 0}, "n"),
    ({"n": 11}, "n"),
    ({"response_format": "url"}, "response_format"),
    ({"prompt": ""}, "prompt"),
    ({"extra_body": {"seed": -2}}, "seed"),
    ({"extra_body": {"guidance_scale": "much"}}, "guidance_scale"),
    ({"extra_body": {"guidance_scale": 1e30}}, "guidance_scale"),
    ({"extra_body": {"mask": "x"}}, "mask"),
    ({"quality": "hd"}, "quality"),
    ({"model": "scenes-llava"}, "model"),
]


def test_a_wrong_field_is_named(server):
    for wrong, name in WRONG:
        with pytest.raises(openai.BadRequestError) as refused:
            generate(server, **wrong)
        assert refused.value.param == name
        assert name in str(refused.value)
