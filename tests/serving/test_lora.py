"""LoRA adapters as models of their own: answers of mixed requests equal those of each adapter alone."""

import contextlib
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.cli.options import ModelOptions
from mmspec.cli.serve import load_engine, read_lora
from mmspec.errors import CheckpointError, InputError, UnsupportedModelError
from mmspec.models.adapters import load_lora, use_adapter
from mmspec.pipelines import MMSpecPipeline
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import Metrics
from mmspec.serving.rows import open_rows
from mmspec.targets.merged import merge_projections
from tests.serving.conftest import post, running, until

peft = pytest.importorskip("peft")

BASE = "assets/scenes-llava"
ADAPTERS = {"loud.v1": 1, "org/calm": 2}
PROMPTS = ["hello", "Describe the image."]
NAMES = ["scenes-llava", *ADAPTERS]


def save_lora(folder: Path, seed: int, **settings: Any) -> Path:
    """Save an adapter that changes much."""
    model = MMSpecPipeline.from_pretrained(BASE, dtype=torch.float32).model
    torch.manual_seed(seed)
    options = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))
    adapted.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(Path(BASE).absolute())
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lora")
    return {name: save_lora(root / str(seed), seed) for name, seed in ADAPTERS.items()}


@contextlib.contextmanager
def serving(folders: dict[str, Path], accelerator: str, in_turn: bool = False):
    how, given = ModelOptions(device="cpu", dtype="float32"), [(n, str(p)) for n, p in folders.items()]
    metrics, cache = Metrics(), 2**26
    engine = load_engine(BASE, accelerator, 4, ServerLimits(), metrics, how, False, cache, adapters=given)
    if in_turn:
        engine.pipeline.accelerator.drafter.rows_move = False
    with running(pipelines={"scenes-llava": engine.pipeline}, rows=4, adapters=list(folders)) as server:
        yield server


def settings_of(index: int) -> dict[str, Any]:
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": index}
    return {"max_tokens": 24, **(sampled if index % 2 else {"temperature": 0.0})}


def alone(folders: dict[str, Path], accelerator: str, **drafter: str) -> dict[tuple[str, int], str]:
    """The answers of a pipeline of each model, with one request at a time."""
    found = {}
    for name in NAMES:
        pipe = MMSpecPipeline.from_pretrained(folders.get(name, BASE), dtype=torch.float32)
        pipe.set_accelerator(accelerator, **drafter)
        for index in range(2 * len(PROMPTS)):
            how = settings_of(index)
            how["max_new_tokens"] = how.pop("max_tokens")
            own = {"top_k": 0} if index % 2 else {}  # as in requests with a temperature
            found[name, index] = pipe(PROMPTS[index % len(PROMPTS)], **how, **own).text[0]
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize(("accelerator", "in_turn"), [("flash", False), ("copy", False), ("copy", True)])
def test_mixed_requests_get_the_answers_of_each_adapter_alone(folders, accelerator, in_turn):
    drafter = {"drafter": "assets/scenes-llava-flash"} if accelerator == "flash" else {}
    expected = alone(folders, accelerator, **drafter)
    for index in range(2 * len(PROMPTS)):
        assert len({expected[name, index] for name in NAMES}) == len(NAMES), "the adapters say other things"

    def ask(name: str, index: int) -> str:
        answer = server.client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}],
            **settings_of(index),
        )
        assert answer.model == name
        return answer.choices[0].message.content

    with serving(folders, accelerator, in_turn) as server:
        cache = server.engines["scenes-llava"].pipeline.target.prefix_cache
        for again in (False, True):  # with a prefix cache that is empty, and with a full one
            hits = cache.hits
            with ThreadPoolExecutor(6) as pool:
                got = dict(zip(expected, pool.map(ask, *zip(*expected, strict=True)), strict=True))
            assert got == expected
            assert not again or cache.hits > hits
        listed = {model.id: getattr(model, "parent", None) for model in server.client.models.list()}
        assert listed == {name: None if name in server.engines else "scenes-llava" for name in NAMES}
        assert server.client.models.retrieve("org/calm").parent == "scenes-llava"
        for unknown in ("sql", "lora0"):
            status, _, got = post(server, {"model": unknown, "messages": []} | {"messages": [USER]})
            assert (status, got["error"]["code"]) == (404, "model_not_found")
            assert all(name in got["error"]["message"] for name in NAMES)


USER = {"role": "user", "content": "hello"}


@pytest.mark.slow
def test_a_cancelled_row_changes_no_row_of_other_adapters(folders):
    long = {"messages": [USER], "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with serving(folders, "flash") as server:
        engine = server.engines["scenes-llava"]
        expected = server.client.chat.completions.create(model="org/calm", **long).choices[0].message.content
        streams = [
            server.client.chat.completions.create(model=name, stream=True, **long)
            for name in ("loud.v1", "scenes-llava")
        ]
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(server.client.chat.completions.create, model="org/calm", **long)
            until(lambda: engine.running == 3 or other.done())
            for stream in streams:
                stream.close()
            assert other.result().choices[0].message.content == expected
        until(lambda: engine.running == 0)
        again = server.client.chat.completions.create(model="loud.v1", messages=[USER], max_tokens=24)
        assert again.choices[0].message.content == alone_once(folders["loud.v1"])


def test_a_failing_round_ends_the_rows_of_its_adapter_alone(folders, monkeypatch):
    pipe = MMSpecPipeline.from_pretrained(BASE, dtype=torch.float32, accelerator="copy")
    for name, folder in folders.items():
        load_lora(pipe.model, name, str(folder))

    def run(batch, adapters):
        """Texts or errors of a request to each adapter."""
        asked = {batch.enter("hello", adapter=name, max_new_tokens=12)[0]: name for name in adapters}
        found = {}
        while asked:
            for handle, event in batch.step():
                if event.error is not None:
                    found[asked.pop(handle)] = str(event.error)
                elif event.finish_reason is not None:
                    found[asked.pop(handle)] = event.output.text[0]
        return found

    with open_rows(pipe, 4, has_adapters=True) as batch:
        alone = run(batch, folders)
        assert len(set(alone.values())) == len(folders)
        own, calls = pipe.target.score, itertools.count()

        def failing(*arguments, **keywords):
            if next(calls) == 0:  # both rows are in their batches
                raise RuntimeError("planted")
            return own(*arguments, **keywords)

        monkeypatch.setattr(pipe.target, "score", failing)
        found = run(batch, folders)
        wrong = [name for name in folders if found[name] != alone[name]]
        assert len(wrong) == 1 and found[wrong[0]] == "planted"
        assert run(batch, folders) == alone


def alone_once(folder: Path) -> str:
    pipe = MMSpecPipeline.from_pretrained(folder, dtype=torch.float32)
    return pipe(USER["content"], max_new_tokens=24).text[0]


def test_an_adapter_acts_on_layers_whose_weights_were_merged(folders):
    ids = torch.arange(3, 20)[None]
    plain, model = (MMSpecPipeline.from_pretrained(BASE, dtype=torch.float32).model for _ in range(2))
    merge_projections(model.modules())
    for name, folder in folders.items():
        load_lora(model, name, str(folder))
    with torch.inference_mode():
        for name in (*folders, None, *folders):
            use_adapter(model, name)
            expected = plain
            if name is not None:
                expected = MMSpecPipeline.from_pretrained(folders[name], dtype=torch.float32).model
            torch.testing.assert_close(model(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_adapters_that_cannot_be_served_are_refused(folders, tmp_path):
    model = MMSpecPipeline.from_pretrained(BASE, dtype=torch.float32).model
    with pytest.raises(InputError, match="must have a name"):
        load_lora(model, "a b", str(folders["loud.v1"]))
    with pytest.raises(InputError, match="must be NAME=PATH"):
        read_lora("path")
    with pytest.raises(CheckpointError, match="must be a folder or hub id of an adapter"):
        load_lora(model, "a", BASE)
    with pytest.raises(UnsupportedModelError, match="modules_to_save must be unset"):
        load_lora(model, "a", str(save_lora(tmp_path / "whole", 3, modules_to_save=["lm_head"])))
    pickled = save_lora(tmp_path / "pickled", 3)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        load_lora(model, "a", str(pickled))
    how = ModelOptions(device="cpu")
    what = "copy", 4, ServerLimits(), Metrics(), how
    with pytest.raises(InputError, match="has no adapter of its own"):
        load_engine(str(folders["loud.v1"]), *what, adapters=[("a", str(pickled))])
