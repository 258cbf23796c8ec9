"""Checkpoints of other forms: adapters, GGUF files, parts on the CPU or the disk, weights of eight bits."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers.integrations.peft import MIN_PEFT_VERSION

from mmspec.accelerators.tuned import fingerprint
from mmspec.errors import CheckpointError, InputError, MissingDependencyError, UnsupportedModelError
from mmspec.models import checkpoint
from mmspec.pipelines import ContinuousImagePipeline, MMSpecPipeline, VisionLanguagePipeline
from mmspec.targets import VisionLanguageTarget
from tests.methods import flash_checks
from tests.methods.heads_checks import medusa_for
from tests.pipelines.byte_level import MERGES, byte_level_tokenizer
from tests.tiny_models import tiny_image, tiny_llama
from tests.tiny_models.continuous import folder_of

RAW: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 12}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def lora(folder: Path, base: Path, name: str | None = None, **settings: Any) -> Any:
    """Write an adapter that changes much, as peft does; gives the model with it merged."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    torch.manual_seed(0)
    model = MMSpecPipeline.from_pretrained(base).model
    options = {"r": 2, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))
    adapted.save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": name or str(base)}))
    return adapted.merge_and_unload()


def test_an_adapter_acts_as_merged_weights_do(checkpoints: Path, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", checkpoints / "text").save_pretrained(tmp_path / "merged")
    for file in (checkpoints / "text").glob("token*"):
        shutil.copy(file, tmp_path / "merged")
    base, merged, adapted = (
        MMSpecPipeline.from_pretrained(folder)
        for folder in (checkpoints / "text", tmp_path / "merged", tmp_path / "adapter")
    )
    pipe: Any
    said = [pipe("red blue green", **RAW).tokens for pipe in (base, merged, adapted)]  # type: ignore[operator]
    assert said[0] != said[1] == said[2]
    pipe = adapted.set_accelerator("draft_model", drafter=checkpoints / "draft")
    assert pipe("red blue green", **RAW).tokens == said[1]
    if Version(importlib.metadata.version("peft")) < Version(MIN_PEFT_VERSION):
        with pytest.raises(MissingDependencyError, match="PEFT.*: pip install -U peft"):
            adapted.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        return
    adapted.save_pretrained(tmp_path / "saved")
    pipe = MMSpecPipeline.from_pretrained(tmp_path / "saved")
    assert pipe("red blue green", **RAW).tokens == said[1]


def odd_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.1", "layers.9"): weight for name, weight in weights.items()}


def infinite(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight * torch.inf for name, weight in weights.items()}


def larger(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.ones(3 + len(weight), 5) for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (odd_names, r"missing keys.*layers\.1"),
        (infinite, "NaN or infinity in: "),
        (larger, "an adapter for "),
    ],
)
def test_an_adapter_that_would_not_act_is_refused(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    match: str,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    lora(tmp_path / "adapter", checkpoints / "text")
    path = tmp_path / "adapter" / WEIGHTS
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=match):
        MMSpecPipeline.from_pretrained(tmp_path / "adapter")


QUESTION = "Repeat this: Zürich, 日本, Zürich, 日本, Zürich."
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: Any, file: Path) -> None:
    """Write a Llama with the byte-level tokenizer as llama.cpp's converter does."""
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    config, tokenizer, writer = model.config, byte_level_tokenizer(), gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*words, *(f"<{index}>" for index in range(len(words), config.vocab_size))])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in model.state_dict().items():
        *layer, part = name.removesuffix(".weight").split(".", 3) if ".layers." in name else [name]
        if part in ("self_attn.q_proj", "self_attn.k_proj"):  # pairs of a rotation stand side by side
            weight = weight.unflatten(0, (-1, 2, config.head_dim // 2)).swapaxes(1, 2).reshape(weight.shape)
        stored = f"blk.{layer[2]}.{LAYER[part]}" if layer else TOP[part.removesuffix(".weight")]
        writer.add_tensor(f"{stored}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def said_by_generate(pipe: Any) -> list[int]:
    asked = pipe.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = pipe.model.generate(**asked, max_new_tokens=32, do_sample=False)[0].tolist()
    return list(output[asked["input_ids"].shape[1] :])


def test_a_file_is_the_model_and_the_tokenizer_that_were_written(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    write_gguf(model, tmp_path / "tiny.gguf")
    pipe: Any = MMSpecPipeline.from_pretrained(tmp_path / "tiny.gguf")
    tokens = pipe(QUESTION, max_new_tokens=32).tokens[0]
    assert tokens == said_by_generate(pipe) and pipe.processor is pipe.tokenizer
    pipe.model, pipe.processor = model, byte_level_tokenizer()
    assert tokens == said_by_generate(pipe)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGUF and nothing else")
    (tmp_path / "wrong.gguf").write_bytes(b"PK and so on")
    for given, keywords, match in (
        (tmp_path / "gone.gguf", {}, r"^gguf_file .*other\.gguf, wrong\.gguf; got 'gone\.gguf'"),
        (
            tmp_path,
            {"gguf_file": "gone.gguf"},
            r"^gguf_file must be a file in .*GGUF files there: .*got 'gone\.gguf'",
        ),
        (tmp_path / "wrong.gguf", {}, "^gguf_file .*GGUF file, which begins with 'GGUF'"),
        (tmp_path / "other.gguf", {"gguf_file": "x"}, "^gguf_file must be None; .*got 'x'"),
    ):
        with pytest.raises(InputError, match=match):
            MMSpecPipeline.from_pretrained(given, **keywords)
    if checkpoint.is_gguf_available():
        with pytest.raises(CheckpointError, match="no usable config"):
            MMSpecPipeline.from_pretrained(tmp_path / "other.gguf")
    monkeypatch.setattr(checkpoint, "is_gguf_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="pip install gguf"):
        MMSpecPipeline.from_pretrained(tmp_path / "other.gguf")


@pytest.mark.parametrize("name", ["scenes-llamagen", "scenes-mar", "scenes-nextstep"])
def test_a_model_that_only_draws_is_no_text_model(name: str) -> None:
    kind = json.loads(Path(f"assets/{name}/config.json").read_text())["model_type"]
    rule = f"models of type '{kind}' generate images only; load them with MMSpecPipeline.from_pretrained"
    with pytest.raises(UnsupportedModelError, match=rule):
        VisionLanguagePipeline.from_pretrained(f"assets/{name}")


CALL: dict[str, Any] = {"images": tiny_image(), "max_new_tokens": 10}
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
EMBEDDINGS, LAYERS = "model.language_model.embed_tokens", "model.language_model.layers"
REST = "model.language_model"


def placed(*on_disk: str) -> dict[str, str]:
    """A device map of a tiny LLaVA with those parts on the disk, and the others in memory."""
    parts = [TOWER, PROJECTOR, "lm_head", EMBEDDINGS, f"{LAYERS}.0", f"{LAYERS}.1", f"{REST}.norm"]
    return {part: "disk" if part in on_disk else "cpu" for part in [*parts, f"{REST}.rotary_emb"]}


@pytest.mark.parametrize("device_map", [{"": "disk"}, placed(TOWER, EMBEDDINGS, f"{LAYERS}.1", "lm_head")])
def test_a_model_in_parts_answers_as_it_does_whole(device_map: dict[str, str], checkpoints: Path) -> None:
    whole: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", device_map="cpu")
    parts: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", device_map=device_map)
    assert any(weight.is_meta for weight in parts.model.parameters())
    assert parts.device == torch.device("cpu")
    drafters = {
        "copy": None,
        "draft_model": checkpoints / "draft",
        "flash": flash_checks.head_for(VisionLanguageTarget(whole.model)),
        "medusa": medusa_for(VisionLanguageTarget(whole.model)),
    }
    for accelerator, drafter in drafters.items():
        wanted, given = (
            pipe.set_accelerator(accelerator, drafter=drafter)("describe the picture", **CALL)
            for pipe in (whole, parts)
        )
        assert given.tokens == wanted.tokens, accelerator
        assert given.stats.target_forwards == wanted.stats.target_forwards, accelerator
    assert len(fingerprint(parts.model)) == 32, "of weights that are not in memory too"


def test_what_needs_a_whole_model_says_so(checkpoints: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", device_map={"": "disk"})
    wanted = pipe("describe", **CALL).tokens
    with pytest.raises(InputError, match="^to cannot move .*offloaded"):
        pipe.to(torch.bfloat16)
    with caplog.at_level(logging.WARNING, "mmspec"):
        pipe.compile()
    assert "runs uncompiled: parts of it are offloaded" in caplog.text
    assert pipe("describe", **CALL).tokens == wanted
    with pytest.raises(InputError, match=r"device_map .* in memory"):
        ContinuousImagePipeline.from_pretrained(folder_of("nextstep"), device_map={"": "disk"})


def test_a_faulty_weight_on_the_disk_is_named(checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints / "text", tmp_path / "text")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for device_map in ({"": "disk"}, {"": "cpu"}):
        with pytest.raises(CheckpointError, match=r"NaN or infinity: model\.layers\.1\.mlp\.up_proj"):
            MMSpecPipeline.from_pretrained(folder, device_map=device_map)


def test_weights_stored_in_eight_bits_are_loaded(checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints / "text", tmp_path / "text")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weight.to(torch.float8_e4m3fn) for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    call: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 4}
    for device_map in ("cpu", {"": "disk"}):
        pipe: Any = MMSpecPipeline.from_pretrained(folder, device_map=device_map, dtype=torch.float32)
        assert pipe.dtype == torch.float32 and len(pipe("red blue", **call).tokens[0]) == 4
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float8_e4m3fn"}))
    with pytest.raises(CheckpointError, match="float8 weights.*pass dtype=torch.bfloat16"):
        MMSpecPipeline.from_pretrained(folder)
