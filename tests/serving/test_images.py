"""Images by OpenAI's own client, against a real server."""

import base64
import io

import numpy as np
import openai
import pytest
from PIL import Image

from tests.serving.conftest import reference

PROMPT = "a red ring left of a small blue cross"


def pixels(datum) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(datum.b64_json))))


def test_images_are_those_of_the_pipeline(server):
    pipe = reference("scenes-llamagen")
    expected = pipe(PROMPT, num_images_per_prompt=2, seed=[3, 4], guidance_scale=2.0)
    size = "{}x{}".format(*expected.images[0].size)
    answer = server.client.images.generate(
        model="scenes-llamagen",
        prompt=PROMPT,
        n=2,
        size=size,
        response_format="b64_json",
        extra_body={"seed": 3, "guidance_scale": 2.0},
    )
    assert len(answer.data) == 2
    for datum, image in zip(answer.data, expected.images, strict=True):
        assert (pixels(datum) == np.asarray(image)).all()
    assert (pixels(answer.data[0]) != pixels(answer.data[1])).any()
    assert answer.usage.output_tokens == sum(expected.stats.new_tokens)
    assert answer.size == size


WRONG = [
    ({"size": "512x512"}, "size"),
    ({"size": "large"}, "size"),
    ({"size": "1e9x1"}, "size"),
    ({"n": 0}, "n"),
    ({"n": 11}, "n"),
    ({"response_format": "url"}, "response_format"),
    ({"prompt": ""}, "prompt"),
    ({"extra_body": {"seed": -1}}, "seed"),
    ({"extra_body": {"guidance_scale": "much"}}, "guidance_scale"),
    ({"extra_body": {"guidance_scale": 1e30}}, "guidance_scale"),
    ({"extra_body": {"mask": "x"}}, "mask"),
    ({"quality": "hd"}, "quality"),
    ({"model": "scenes-llava"}, "model"),
]


def test_a_wrong_field_is_named(server):
    for wrong, name in WRONG:
        with pytest.raises(openai.BadRequestError) as refused:
            server.client.images.generate(**{"model": "scenes-llamagen", "prompt": PROMPT, **wrong})
        assert refused.value.param == name
        assert name in str(refused.value)
