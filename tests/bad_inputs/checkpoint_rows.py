"""Bad checkpoints as data: rows 49 to 54."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, T5Config

from mmspec.errors import CheckpointError, UnsupportedModelError
from mmspec.pipelines import MMSpecPipeline
from tests.bad_inputs.refusals import Bench, Row
from tests.tiny_models import tiny_llama, tiny_minimax, tiny_tokenizer

Damage = Callable[[Path], object]
WEIGHTS = "model.safetensors"


def load(folder: object) -> object:
    return MMSpecPipeline.from_pretrained(folder, accelerator="none")  # type: ignore[arg-type]


def damaged(
    number: int, name: str, damage: Damage, argument: str, *expected: str, error: Any = CheckpointError
) -> Row:
    def call(bench: Bench) -> object:
        folder = bench.copy()
        damage(folder)
        return load(folder)

    return Row(number, name, call, argument, tuple(expected), error)


def place(name: str, *expected: str, source: object) -> Row:
    def call(bench: Bench) -> object:
        return load(source(bench) if callable(source) else source)

    return Row(54, name, call, "model", tuple(expected), CheckpointError)


def draft(name: str, damage: Callable[[Bench], object], *expected: str) -> Row:
    def call(bench: Bench) -> object:
        return bench.text.set_accelerator("draft_model", drafter=damage(bench))  # type: ignore[arg-type]

    return Row(51, name, call, "drafter", tuple(expected), CheckpointError)


def weights(data: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(data(path.read_bytes()))

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    def rewrite(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + size])
        change(table)
        text = json.dumps(table).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return weights(rewrite)


def tensors(change: Callable[[dict[str, torch.Tensor]], object], file: str = WEIGHTS) -> Damage:
    def damage(folder: Path) -> None:
        table = load_file(folder / file)
        change(table)
        save_file(table, folder / file, metadata={"format": "pt"})

    return damage


def config(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        table = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))

    return damage


def text(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def index(*shards: str) -> Damage:
    table = {"metadata": {}, "weight_map": {f"weight {i}": shard for i, shard in enumerate(shards)}}
    return text(f"{WEIGHTS}.index.json", json.dumps(table))


def other(name: str) -> Any:
    def change(table: dict[str, Any]) -> None:
        names = sorted(key for key in table if key != "__metadata__")
        match name:
            case "overlap":
                table[names[1]]["data_offsets"] = table[names[0]]["data_offsets"]
            case "hole":
                del table[names[2]]
            case "dtype":
                table[names[0]]["dtype"] = "F7"

    return change


def only_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


class Code:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('the code of a checkpoint was run')",))


def renamed_pickle(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Code()))


def spoil(name: str, value: float) -> Damage:
    return tensors(lambda table: table[name].view(-1)[3:4].fill_(value))


def transpose(table: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    table[name] = table[name].T.contiguous()


def saved(bench: Bench, model: Any = None, tokenizer: Any = None) -> Path:
    folder = bench.folder / "other"
    with torch.random.fork_rng():
        (model or tiny_llama(vocab=128)).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def other_tokenizer(bench: Bench) -> Path:
    folder = saved(bench)
    path = folder / "tokenizer.json"
    table = json.loads(path.read_text())
    vocabulary = table["model"]["vocab"]
    words = [word for word, number in vocabulary.items() if number > 20]
    numbers = [vocabulary[word] for word in words]
    vocabulary.update(zip(words, numbers[1:] + numbers[:1], strict=True))
    path.write_text(json.dumps(table))
    return folder


def wrong_case(bench: Bench) -> Path:
    return bench.copy().parent / "CheckPoint"


REFUSED, SMALL = tiny_minimax(), tiny_llama(vocab=64)
NO_CODE = "pass trust_remote_code=True if you trust it"
UP, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
LIST = "a JSON object with the key 'model_type'"

CHECKPOINTS = [
    *[damaged(49, f"safetensors: {name}", weights(change), WEIGHTS, "a complete safetensors file")
      for name, change in {
          "empty": lambda d: b"", "4 bytes": lambda d: d[:4], "half": lambda d: d[: len(d) // 2],
          "cut by a byte": lambda d: d[:-1], "a byte more": lambda d: d + b"\0",
          "header of 2^40 bytes": lambda d: (2**40).to_bytes(8, "little") + d[8:],
          "header not JSON": lambda d: d[:8] + b"x" * 200 + d[208:], "zeros": lambda d: bytes(len(d)),
      }.items()],
    *[damaged(49, f"safetensors: {name}", header(other(name)), WEIGHTS, "a complete safetensors file")
      for name in ("overlap", "hole", "dtype")],
    damaged(49, "safetensors without tensors", tensors(lambda table: table.clear()), "model",
            "missing keys", "lm_head.weight", "more"),
    damaged(50, "NaN weight", spoil(UP, float("nan")), "model", "NaN or infinity", UP),
    damaged(50, "missing key", tensors(lambda table: table.pop(UP)), "model", "missing keys", UP),
    damaged(50, "transposed weight", tensors(transpose), "model", "wrong shapes", UP),
    damaged(50, "other hidden size", config(hidden_size=16, head_dim=4), "model", "wrong shapes", "more"),
    damaged(50, "other vocabulary", config(vocab_size=50), "model", "wrong shapes", "embed_tokens"),
    damaged(50, "tokenizer of a larger vocabulary",
            lambda folder: SMALL.save_pretrained(folder), "tokenizer", "64"),
    damaged(50, "no tokenizer", lambda f: [p.unlink() for p in f.glob("tokenizer*")], "model",
            "no usable processor"),
    draft("draft with another tokenizer", other_tokenizer, "target's tokenizer", "%", "the same id"),
    draft("draft without weights", lambda b: [saved(b), (b.folder / "other" / WEIGHTS).unlink()][0],
          "safetensors weights"),
    draft("no such draft", lambda b: b.folder / "none", "a folder with a checkpoint"),
    damaged(52, "no config", lambda folder: (folder / "config.json").unlink(), "model", "config.json"),
    damaged(52, "config is a list", text("config.json", "[1, 2]"), "config.json", LIST),
    damaged(52, "config not JSON", text("config.json", "{'a'"), "config.json", "valid JSON"),
    damaged(52, "config of 10 MB", text("config.json", " " * 10**7), "config.json", "10000000 bytes",
            "at most 1000000"),
    damaged(52, "config is a folder",
            lambda folder: [(folder / "config.json").unlink(), (folder / "config.json").mkdir()], "model"),
    damaged(52, "no model type", config(model_type=None), "config.json", LIST),
    damaged(52, "unknown model type", config(model_type="lama"), "config.json: model_type",
            "did you mean 'llama'?"),
    damaged(52, "model type of a number", config(model_type=5), "config.json: model_type", "got 5"),
    damaged(52, "auto_map", config(auto_map={"AutoConfig": "x.X"}), "config.json", NO_CODE),
    damaged(52, "auto_map inside", config(text_config={"auto_map": {"AutoConfig": "x.X"}}), "config.json",
            NO_CODE),
    damaged(52, "auto_map of the tokenizer",
            text("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.X", null]}}'),
            "tokenizer_config.json", NO_CODE),
    *[damaged(52, f"{key}={value}", config(**{key: value}), f"config.json: {key}", "between 0 and ")
      for key, value in (("hidden_size", -32), ("vocab_size", -1), ("num_hidden_layers", 10**12),
                         ("intermediate_size", 10**12), ("num_attention_heads", -4))],
    *[damaged(52, f"{key}={value!r}", config(**{key: value}), "model")
      for key, value in (("hidden_size", "32"), ("num_hidden_layers", [2]), ("num_attention_heads", 0),
                         ("num_attention_heads", 5), ("rope_scaling", 5), ("hidden_act", "nope"))],
    damaged(52, "sizes without end", config(hidden_size=10**6, intermediate_size=10**6), "model",
            "wrong shapes"),
    damaged(52, "encoder-decoder", lambda f: T5Config().save_pretrained(f), "", "t5",
            error=UnsupportedModelError),
    damaged(52, "recurrent model", REFUSED.save_pretrained, "", "recurrent",
            error=UnsupportedModelError),
    damaged(52, "encoder", lambda f: BertConfig(is_decoder=False).save_pretrained(f), "model"),
    damaged(53, "only a pickle", only_pickle, "model", "safetensors weights", "save_pretrained"),
    damaged(53, "pickle named .safetensors", renamed_pickle, WEIGHTS, "a complete safetensors file"),
    *[damaged(53, f"index with {name}", index(shard), "index.json", "folder")
      for name, shard in {"../": "../x.safetensors", "/": "/etc/passwd", "a missing file": "b.safetensors",
                          "a folder": "a/b.safetensors", "..": ".."}.items()],
    *[damaged(53, f"index of {name}", text(f"{WEIGHTS}.index.json", data), "index.json")
      for name, data in {"a list": "[]", "no JSON": "{", "a map of numbers": '{"weight_map": {"a": 5}}',
                         "a list as map": '{"weight_map": ["a"]}', "no map": "{}"}.items()],
    place("missing folder", "/no/such/folder", "folder with a checkpoint", source="/no/such/folder"),
    place("empty folder", "a folder with a config.json", source=lambda bench: bench.folder),
    place("file", "a folder with a checkpoint", source=lambda bench: bench.copy() / WEIGHTS),
    place("wrong case", "did you mean", "checkpoint'", source=wrong_case),
    place("hub id without network", "nobody/nothing", "HF_HUB_OFFLINE", "folder", source="nobody/nothing"),
    place("no id at all", "got ''", source=""),
    place("not a name", "got 5", source=5),
    place("half downloaded", "a folder with a config.json",
          source=lambda b: [b.copy(), (b.folder / "checkpoint" / "config.json").unlink()][0]
          or b.folder / "checkpoint"),
]  # fmt: skip
