"""Images by OpenAI's own client, against a real server."""

import openai
import pytest

from mmspec.cli.options import ModelOptions
from mmspec.cli.serve import load_engine
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import Metrics
from tests.tiny_models.llamagen import save_llamagen

PROMPT = "a red ring left of a small blue cross"


def generate(server, **settings: object):
    what = {"model": "scenes-llamagen", "prompt": PROMPT, "response_format": "b64_json", **settings}
    return server.client.images.generate(**what)


def test_a_server_that_is_told_nothing_draws_by_windows_that_follow_its_rows(tmp_path) -> None:
    """Images equal those of plain decoding with their seeds, for any number of running rows."""
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
