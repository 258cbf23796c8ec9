"""`mmspec convert` as a user types it."""

import json

import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from mmspec.cli.application import app
from tests.families.official_layout import CLASSES, transformer_state


def run(*arguments: object):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_it_writes_a_folder_and_says_what(tmp_path):
    source, out = tmp_path / "c2i_B_256.pt", tmp_path / "new" / "model"
    torch.save({"model": transformer_state(**CLASSES)}, source)
    result = run("convert", source, "--out", out, "--heads", 2, "--dtype", "bfloat16", "--json")
    written = json.loads(result.stdout)
    assert written["path"] == str(out) and written["grid_size"] == 16 and written["kind"] == "class"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert written["parameters"] == sum(p.numel() for p in model.parameters())
    plain = run("convert", source, "--out", tmp_path / "b", "--heads", 2)
    assert plain.stdout == f"{tmp_path / 'b'}\n"
