"""Keywords of transformers in `from_pretrained`: each acts, or is refused before weights are read."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

import mmspec
from mmspec.accelerators import option_names
from mmspec.errors import InputError, MMSpecError
from mmspec.pipelines import MMSpecPipeline
from mmspec.pipelines import base as base_module
from mmspec.pipelines.loading import BITS, HOW, REFUSED, WHERE
from mmspec.plugins import METHODS, RULES
from mmspec.targets import CausalTarget
from tests.methods.heads_checks import medusa_for
from tests.tiny_models import tiny_image, tiny_llama

RAW: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 4}


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing load a model: what is refused has to be refused before."""
    for name in ("load_model", "place_head"):
        monkeypatch.delattr(base_module, name)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "bitsandbytes"),
    ({"load_in_4bit": True}, "quantization_config .*bitsandbytes"),
    (
        {"quantization_config": {"quant_method": "nope"}},
        "quantization_config cannot be used: Unknown quantization type, got nope",
    ),
    ({"bnb_4bit_quant_type": "nf4"}, "bnb_4bit_quant_type .*load_in_4bit=True"),
    ({"max_memory": {"cpu": "1GiB"}}, "max_memory .*device_map='auto'"),
    ({"offload_folder": "x"}, "offload_folder .*device_map='auto'"),
    (
        {"offload_folder": "x", "device_map": {"": "cpu"}},
        "offload_folder needs device_map='auto', or a device_map with parts on the disk",
    ),
    ({"low_cpu_mem_usage": True}, "^low_cpu_mem_usage is not supported; transformers 5 .*got True"),
    ({"ignore_mismatched_sizes": True}, "ignore_mismatched_sizes is not supported; weights of another shape"),
    ({"weights_only": False}, "^weights_only must be True; pickles .*got False"),
    ({"use_safetensors": False}, r"model .*like \*\.bin"),
    ({"variant": "fp16"}, r"model .*fp16"),
    ({"gguf_file": "x.gguf"}, "^gguf_file .*GGUF files there: none; got 'x.gguf'"),
    ({"subfolder": "x"}, "model .*config.json"),
    ({"min_pixels": 4}, "^keyword of loading must be known to the processor.*got 'min_pixels'"),
    ({"max_memry": {}}, "^keyword of loading must .*did you mean 'max_memory'.*got 'max_memry'"),
    ({"load_in_4bits": True}, "did you mean 'load_in_4bit'"),
    ({"min_macth": 3}, "option of accelerator 'copy' must .*did you mean 'min_match'"),
    ({"xyzzy": 3}, "option of accelerator 'copy' must .*a keyword of transformers"),
    ({"min_match": 0}, "^min_match must be an integer of at least 1; got 0"),
    ({"acceptance": "typicel"}, "did you mean 'typical'"),
    ({"acceptance": "typical", "epsilon": 3}, "^epsilon must be between 0 and 1; got 3"),
    ({"length": "x"}, "^length must be one of auto, confidence, cost, fixed; got 'x'"),
    ({"accelerator": "none", "num_draft_tokens": 3}, "option of accelerator 'none'"),
    ({"drafter": "x"}, "^drafter must be None; .*got 'x'"),
    ({"accelerator": "eagle"}, "^drafter must be the folder or hub id of a head .*got None"),
    ({"accelerator": "auto", "batch_sise": 2}, "did you mean 'batch_size'"),
    ({"accelerator": "auto", "batch_size": 0}, "^batch_size must be an integer of at least 1; got 0"),
]


@pytest.mark.usefixtures("no_load")
def test_what_cannot_act_is_refused_before_weights_are_read(checkpoints: Path) -> None:
    for keywords, match in REFUSALS:
        with pytest.raises(MMSpecError, match=match):
            MMSpecPipeline.from_pretrained(checkpoints / "llava", **keywords)


@pytest.mark.usefixtures("no_load")
def test_options_of_what_drafts_are_refused_before_the_target_is_read(
    checkpoints: Path, tmp_path: Path
) -> None:
    medusa_for(CausalTarget(tiny_llama(vocab=128))).save_pretrained(tmp_path)
    drafters = {"medusa": tmp_path, "draft_model": checkpoints / "draft"}
    options: dict[str, Any]
    for name, options, match in (
        (
            "draft_model",
            {"num_draft_tokens": -1},
            "^num_draft_tokens must be an integer from 1 to 512; got -1",
        ),
        ("draft_model", {"sampling": "x"}, "^sampling must be one of coupled, greedy, .*got 'x'"),
        ("draft_model", {"top_k": 3}, "option of accelerator 'draft_model'"),
        ("medusa", {"depth": 0}, "^depth must be an integer from 1 to 24; got 0"),
        ("medusa", {"tree": "x"}, "^tree must be one of dynamic, eagle, .*got 'x'"),
        ("medusa", {"widht": 0}, "option of accelerator 'medusa'"),
    ):
        with pytest.raises(InputError, match=match):
            MMSpecPipeline.from_pretrained(
                checkpoints / "text", accelerator=name, drafter=drafters[name], **options
            )


def test_keywords_reach_model_processor_and_config(checkpoints: Path, tmp_path: Path) -> None:
    config = GenerationConfig(max_new_tokens=3)
    pipe: Any = MMSpecPipeline.from_pretrained(
        checkpoints / "text", padding_side="left", generation_config=config, rms_norm_eps=0.5, min_match=1
    )
    assert pipe.tokenizer.padding_side == "left"
    assert pipe.model.generation_config.max_new_tokens == 3
    assert pipe.model.config.rms_norm_eps == pipe.model.model.norm.variance_epsilon == 0.5
    assert pipe.accelerator.drafter.min_match == 1
    own = AutoConfig.from_pretrained(checkpoints / "text", rms_norm_eps=0.25)
    assert MMSpecPipeline.from_pretrained(checkpoints / "text", config=own).model.config.rms_norm_eps == 0.25
    with pytest.raises(InputError, match=r"^rms_norm_eps cannot be combined with config.*got 0\.5"):
        MMSpecPipeline.from_pretrained(checkpoints / "text", config=own, rms_norm_eps=0.5)
    (tmp_path / "outer").mkdir()
    shutil.copytree(checkpoints / "text", tmp_path / "outer" / "inner")
    weights = tmp_path / "outer" / "inner" / "model.safetensors"
    weights.rename(weights.with_name("model.fp32.safetensors"))
    inner: Any = MMSpecPipeline.from_pretrained(tmp_path / "outer", subfolder="inner", variant="fp32")
    assert len(inner("red", **RAW).tokens[0]) == 4


def test_sizes_of_images_reach_the_processor_of_images(checkpoints: Path) -> None:
    def seen(**keywords: Any) -> int:
        pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / "qwen2_5_vl", **keywords)
        grid: Any = pipe.processor.image_processor(images=[tiny_image()], return_tensors="pt")
        return int(grid["image_grid_thw"].prod())

    small = {"shortest_edge": 10, "longest_edge": 784}
    assert seen(size=small) == 4 < seen() < seen(size={"shortest_edge": 12544, "longest_edge": 20000})
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / "llava", do_rescale=False)
    assert pipe.processor.image_processor.do_rescale is False


def test_pickles_of_tensors_are_read_where_asked_for(checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints / "text", tmp_path / "text")
    state = MMSpecPipeline.from_pretrained(folder).model.state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="use_safetensors=False for pickles of tensors alone"):
        MMSpecPipeline.from_pretrained(folder)
    pipe: Any = MMSpecPipeline.from_pretrained(folder, use_safetensors=False)
    assert len(pipe("red", **RAW).tokens[0]) == 4


def test_no_option_of_an_accelerator_is_a_keyword_of_loading() -> None:
    options = set().union(*(option_names(name) for name in METHODS))
    options |= set().union(*(option_names("copy", rule) for rule in RULES))
    assert not options & (WHERE | HOW | set(REFUSED) | set(BITS))


def test_the_keywords_of_transformers_are_all_known() -> None:
    taken: set[str] = set()
    for function in (PreTrainedModel.from_pretrained, _BaseAutoModelClass.from_pretrained):
        source = inspect.getsource(function)
        taken |= set(inspect.signature(function).parameters) | set(
            re.findall(r'kwargs\.pop\("(\w+)"', source)
        )
    ours = {"cls", "config", "kwargs", "model_args", "pretrained_model_name_or_path", "torch_dtype"}
    assert {name for name in taken if not name.startswith("_")} <= WHERE | HOW | set(REFUSED) | ours


def test_an_accelerator_is_written_with_its_options_wherever_it_is_named(checkpoints: Path) -> None:
    written, folder = "copy:num-draft-tokens=3:top_k=2:acceptance=typical", checkpoints / "text"
    draft = f"draft_model:num_draft_tokens=2:drafter={checkpoints / 'draft'}"

    def shape(accelerator: Any) -> tuple[Any, ...]:
        drafter = accelerator.drafter
        return drafter.num_draft_tokens, getattr(drafter, "top_k", None), type(accelerator.rule).__name__

    expected = 3, 2, "Typical"
    pipe = MMSpecPipeline.from_pretrained(folder, accelerator=written)
    assert shape(pipe.accelerator) == expected
    assert shape(MMSpecPipeline.from_pretrained(folder, accelerator=draft).accelerator)[0] == 2
    assert shape(pipe.set_accelerator(draft).accelerator)[0] == 2
    assert shape(pipe.set_accelerator(written).accelerator) == expected
    assert shape(pipe.set_accelerator("copy:top_k=2", num_draft_tokens=5).accelerator)[:2] == (5, 2)
    assert shape(type(pipe)(pipe.model, pipe.processor, written).accelerator) == expected
    assert shape(mmspec.accelerate(written).accelerator) == expected  # type: ignore[attr-defined]
    model = mmspec.enable(pipe.model, written)
    assert shape(vars(model)["_mmspec_enabled"].method) == expected
    mmspec.disable(model)
    for one in (pipe.set_accelerator, mmspec.accelerate, lambda *a, **k: mmspec.enable(model, *a, **k)):
        for accelerator, options, match in (
            ("copy:top_k=2", {"top_k": 2}, "^top_k is given twice; accelerator 'copy:top_k=2' .*got 2"),
            ("copy:topk=2", {}, "did you mean 'top_k'"),
            ("copi:top_k=2", {}, "did you mean 'copy'"),
            ("copy:top_k", {}, "options as name=value"),
        ):
            with pytest.raises(InputError, match=match):
                one(accelerator, **options)
