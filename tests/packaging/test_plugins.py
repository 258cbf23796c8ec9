"""A package outside the repository adds a method and a model family by entry points."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from mmspec.core.interfaces import Drafter
from mmspec.errors import InputError
from mmspec.plugins import FAMILIES, HEADS, METHODS, RULES, Method, load, records, unique
from tests.packaging.source_tree import ROOT

#: Its snippets: record and drafter of a method, record and target of a family.
PAGE = (ROOT / "docs" / "how-to" / "writing-a-method.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FAMILY = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mmspec.plugins import Family


class StrangersConfig(LlamaConfig):
    model_type = "strangers_llama"


class StrangersForCausalLM(LlamaForCausalLM):
    config_class = StrangersConfig


AutoConfig.register("strangers_llama", StrangersConfig)
AutoModelForCausalLM.register(StrangersConfig, StrangersForCausalLM)
STRANGERS = Family("strangers_llama", "mmspec.targets.causal:CausalTarget")
"""
SKETCH = """
from transformers import LlamaConfig, LlamaForCausalLM


class SketchConfig(LlamaConfig):
    model_type = "sketch"
    grid_size: int = 4


class SketchForCausalLM(LlamaForCausalLM):
    config_class = SketchConfig
"""
CONTRACT = """
import sys
from pathlib import Path

import torch
from strangers.sketch.modeling import SketchConfig, SketchForCausalLM
from transformers import AutoTokenizer

from tests.contracts.family_checks import Checkpoint, check_all
from tests.tiny_models import randomise

base, words = sys.argv[1:]


def write(folder):
    tokenizer = AutoTokenizer.from_pretrained(words)
    config = SketchConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )
    randomise(SketchForCausalLM(config), 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


check_all(Checkpoint("sketch", write), Path(base))
print("kept")
"""
MODEL = """
import sys

import torch
from strangers.family import StrangersConfig, StrangersForCausalLM
from transformers import AutoTokenizer

folder, words, commands = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(words)
config = StrangersConfig(
    vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
torch.manual_seed(0)
StrangersForCausalLM(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
"""
COMMANDS = """
import contextlib
import io
import json

from mmspec.cli import main

for command in json.loads(commands):
    sys.argv = ["mmspec", *command]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main()
        except SystemExit as end:
            assert not end.code, said.getvalue()
    print(json.dumps(json.loads(said.getvalue())))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package `strangers`: the snippets of the docs, and a family."""
    site = tmp_path_factory.mktemp("site")
    record, drafter = SNIPPETS[:2]
    package = site / "strangers"
    package.mkdir()
    (package / "__init__.py").write_text(record.replace("mmspec.methods.repeat.drafter", "strangers.drafter"))
    (package / "drafter.py").write_text(drafter)
    (package / "family.py").write_text(FAMILY)
    sketch = package / "sketch"
    sketch.mkdir()
    for file, text in (("__init__.py", SNIPPETS[2]), ("target.py", SNIPPETS[3]), ("modeling.py", SKETCH)):
        (sketch / file).write_text(text.replace("mmspec.families.sketch", "strangers.sketch"))
    info = site / "strangers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        dedent("""\
            [mmspec.methods]
            repeat = strangers:METHODS

            [mmspec.families]
            strangers_llama = strangers.family:STRANGERS
            sketch = strangers.sketch:FAMILIES
            """)
    )
    return site


def run(site: Path, *command: str) -> str:
    """Standard output of a Python that has the package installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_method_and_a_family_from_outside_are_listed_and_measured(site: Path, tmp_path: Path) -> None:
    """By one Python that has the package installed: each command's output is a line."""
    folder, words = str(tmp_path / "model"), str(ROOT / "assets" / "scenes-llava")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a red ring left of a blue cross"}) + "\n")
    how = ("--samples", "1", "--max-new-tokens", "8", "--repeats", "1", "--json")
    prompts = ("--prompt-file", str(tmp_path / "prompts.jsonl"))
    commands = [
        ["accelerators", "--json"],
        ["bench", "--accelerator", "none,repeat:num_draft_tokens=3", "--task", "caption", *how],
        ["bench", folder, *prompts, "--accelerator", "none,copy,repeat", *how],
    ]
    (tmp_path / "commands.py").write_text(MODEL + COMMANDS)
    said = run(site, str(tmp_path / "commands.py"), folder, words, json.dumps(commands))
    listed, scenes, own = map(json.loads, said.splitlines())
    (repeat,) = [row for row in listed if row["name"] == "repeat"]
    assert repeat["exactness"] == "exact" and repeat["options"] == ["num_draft_tokens"]
    assert {row["accelerator"] for row in scenes["records"]} >= {"none", "repeat:num_draft_tokens=3"}
    assert {row["accelerator"] for row in own["records"]} == {"none", "copy", "repeat"}
    assert all(row["identical"] == 1 for row in (*scenes["records"], *own["records"]))


def test_the_family_of_the_docs_keeps_the_contract_of_families(site: Path, tmp_path: Path) -> None:
    (tmp_path / "contract.py").write_text(CONTRACT)
    script = (str(tmp_path / "contract.py"), str(tmp_path), str(ROOT / "assets" / "scenes-llava"))
    assert run(site, *script).strip().endswith("kept")


def test_records_name_what_exists() -> None:
    for method in METHODS.values():
        assert issubclass(method.drafter_class, Drafter), method.name
        assert method.rule is None or method.rule in RULES and method.make is None, method.name
        assert method.summary and (method.needs is None) <= (method.head is None), method.name
    for record in records():
        assert record.drafter or record.rules and not record.trials and not record.tuned, record.name
    assert HEADS.keys() <= METHODS.keys()
    assert all(RULES[name] for name in RULES)
    for family in FAMILIES.values():
        parts = [value for value in vars(family).values() if isinstance(value, str) and ":" in value]
        assert family.target in parts and all(map(load, parts)), family.name


def test_two_plug_ins_of_one_name_are_an_error() -> None:
    twice = [("copy", Method("copy")), ("copy", Method("copy"))]
    with pytest.raises(InputError, match="copy"):
        unique("accelerator", twice)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'lantern'"):
        METHODS["lanten"]
