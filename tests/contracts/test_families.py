"""The contract of every model family, on small random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import logging

from mmspec.families.llamagen.conversion import convert_checkpoint
from mmspec.plugins import FAMILIES, load
from tests.contracts import family_checks
from tests.contracts.family_checks import Checkpoint
from tests.families.naive_masked import unmask_blocks, unmask_everywhere
from tests.families.official_layout import HEADS, IMAGE_SIZE, VOCABULARY
from tests.families.parallel_layout import lpd_state, naive_lpd, naive_nar, naive_par, nar_state, par_state
from tests.families.scale_layout import SIDES, naive_var, vae_state, var_state
from tests.families.test_parallel_images import Noise, groups_of
from tests.tiny_models import (
    save_masked,
    tiny_anole,
    tiny_emu3,
    tiny_emu3_5,
    tiny_janus,
    tiny_lumina,
)
from tests.tiny_models.continuous import autoencoder, mar, nextstep, save
from tests.tiny_models.diffusion_gemma import HAS_DIFFUSION_GEMMA
from tests.tiny_models.diffusion_gemma_pipeline import tiny_canvas_parts
from tests.tiny_models.image_tokens import CODES
from tests.tiny_models.llamagen import save_llamagen, tiny_vq
from tests.versions import OLDEST

State = dict[str, Tensor]
SCALE = 2.5
GUIDED: dict[str, Any] = {"guidance_scale": SCALE}
UNTRUNCATED: dict[str, Any] = {"guidance_scale": SCALE, "guidance_schedule": "constant", "top_k": 0}
PRECISE = {"dtype": torch.float64}


def parts(made: Callable[[], tuple[Any, Any]], levels: int = 0) -> Callable[[Path], None]:
    """Writes a model, its tokenizer, and an image tokenizer of these levels if that is a separate model."""

    def write(folder: Path) -> None:
        for part in made():
            part.save_pretrained(folder)
        if levels:
            tiny_vq(codes=CODES, levels=levels).save_pretrained(folder / "vq")

    return write


def few_steps() -> tuple[Any, Any]:
    """A DiffusionGemma that denoises a canvas in few steps."""
    model, processor = tiny_canvas_parts()
    model.generation_config.max_denoising_steps = 4
    return model, processor


def official(state: State, vq: State | None = None) -> Callable[[Path], None]:
    """Converts official files: of a transformer, and of its image tokenizer, if that is not a tiny one."""

    def write(folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder.parent / "tiny.pt")
        is_of_llamagen = "tok_embeddings.weight" in state
        size = {"image_size": IMAGE_SIZE, "num_heads": HEADS} if is_of_llamagen else {}
        heads = {"num_heads": HEADS} if "fake_latent" in state else {}
        convert_checkpoint(folder.parent / "tiny.pt", folder, **size, **heads)
        if vq is None:
            tiny_vq(codes=VOCABULARY).save_pretrained(folder / "vq")
            return
        torch.save(vq, folder.parent / "vae.pth")
        convert_checkpoint(folder.parent / "vae.pth", folder / "vq")

    return write


def by_generate(pipe: Any, asked: Any, seed: int) -> list[int]:
    """Greedy output of `generate` of transformers, with the keywords of the family."""
    what: dict[str, Any] = {"class_labels": [asked]} if pipe.target.classes else {"prompt": asked}
    (request,) = pipe.prepare(what.pop("prompt", None), {"guidance_scale": SCALE}, **what).requests
    _, _, keywords = load(FAMILIES[pipe.model.config.model_type].generate)(pipe.target, request, SCALE)
    output: Tensor = pipe.model.generate(**keywords, do_sample=False)
    return list(output[0, -pipe.target.grid.length :].tolist())


def by_lpd(pipe: Any, asked: Any, seed: int) -> list[int]:
    order = pipe.accelerator.drafter.order
    groups = groups_of(order, pipe.target, seed)
    return naive_lpd(lpd_state(), asked, groups, lambda decided: SCALE, Noise(seed).choose)


def by_nar(pipe: Any, asked: Any, seed: int) -> list[int]:
    return naive_nar(nar_state(), asked, SCALE, Noise(seed).choose)


def by_par(pipe: Any, asked: Any, seed: int) -> list[int]:
    return naive_par(par_state(), asked, pipe.target.group_size, SCALE, Noise(seed).choose)


def by_var(pipe: Any, asked: Any, seed: int) -> list[int]:
    return naive_var(var_state(), vae_state(), SIDES, asked, SCALE - 1, Noise(seed).choose)


def by_unmasking(pipe: Any, asked: Any, seed: int) -> list[int]:
    """One place a forward pass, the most probable first."""
    mask = pipe.model.config.mask_token_id

    def choose(scores: list[float], place: int, decided: int) -> tuple[int, list[float]]:
        p = torch.tensor(scores, dtype=torch.float64).index_fill(0, torch.tensor(mask), -torch.inf).softmax(0)
        return int(p.argmax()), p.tolist()

    prompt = pipe.tokenizer(asked)["input_ids"]
    slow = unmask_everywhere if pipe.model.config.block_length is None else unmask_blocks
    return slow(pipe.model, prompt, family_checks.NEW_TOKENS, choose)[0]


def masked(kind: str, **more: Any) -> Checkpoint:
    return Checkpoint(
        "masked_language",
        lambda folder: save_masked(kind, folder),
        oracle=by_unmasking,
        greedy=True,
        **{"wrong": {"mask_token_id": (10**6, "mask_token_id must be a token id")}, **more},
    )


def kin(family: str, state: State, oracle: Any, wrong: dict[str, Any], **more: Any) -> Checkpoint:
    """Return the checkpoint of a relative of LlamaGen with classes."""
    how = {"settings": UNTRUNCATED, "loading": PRECISE, "asked": (0, 3), **more}
    return Checkpoint(family, official(state), oracle=oracle, wrong=wrong, **how)


WRONG_CONDITION = {
    "condition_type": ("colour", "condition_type must be 'class' or 'caption'; got 'colour'"),
    "hidden_size": ("wide", "Field 'hidden_size' expected int, got str"),
}
WRONG_TEXT = {"text_config": ({"hidden_size": -1}, "hidden_size must be between 0")}
#: A new family needs a line here.
CHECKPOINTS = {
    "janus": Checkpoint(
        "janus",
        parts(tiny_janus),
        wrong=WRONG_TEXT,
        oracle=None if OLDEST else by_generate,
        greedy=True,
        settings=GUIDED,
    ),
    "emu3": Checkpoint(
        "emu3",
        parts(tiny_emu3),
        wrong=WRONG_TEXT,
        weight="text_model.lm_head.weight",
        loaded_as="lm_head.weight",
        settings={"height": 8, "width": 8},
    ),
    "emu3_5": Checkpoint(
        "emu3_5",
        parts(tiny_emu3_5, 5),
        settings={"height": 64, "width": 64},
        wrong={"eoi_token_id": (10**6, "vocab_size must be above 1000001")},
    ),
    "chameleon": Checkpoint("chameleon", parts(tiny_anole, 4)),
    "lumina_mgpt": Checkpoint(
        "lumina_mgpt", parts(tiny_lumina, 4), name="Lumina-tiny", settings={"height": 32, "width": 32}
    ),
    "llamagen, classes": Checkpoint(
        "llamagen",
        lambda folder: save_llamagen(folder, "class", grid=4),
        asked=(0, 3),
        settings=GUIDED,
        wrong=WRONG_CONDITION,
        oracle=by_generate,
        greedy=True,
    ),
    "llamagen, captions": Checkpoint(
        "llamagen",
        lambda folder: save_llamagen(folder, "caption", grid=4),
        settings=GUIDED,
        oracle=by_generate,
        greedy=True,
    ),
    "lpd": kin("lpd", lpd_state(), by_lpd, {"body": ("cnn", "body must be 'llamagen' or 'vit'")}),
    "nar": kin("nar", nar_state(), by_nar, WRONG_CONDITION, weight="lm_head.below.weight"),
    "par": kin("par", par_state(), by_par, {"regions": (3, "regions must be the square of a divisor of 4")}),
    "var": Checkpoint(
        "var",
        official(var_state(), vae_state()),
        asked=(0, 3),
        settings={**UNTRUNCATED, "guidance_schedule": "rising", "top_p": 1.0},
        wrong={"patch_nums": ([1, 3, 2], "patch_nums must be positive integers in increasing order")},
        oracle=by_var,
        loading=PRECISE,
    ),
    "mar": Checkpoint(
        "mar",
        lambda folder: save(mar(grid_size=6), folder, autoencoder()),
        asked=(0, 3),
        settings={"num_inference_steps": 2, "guidance_scale": 2.0},
        weight="z_proj.weight",
        wrong={"num_attention_heads": (3, "hidden_size must be a multiple of the 3 heads")},
    ),
    "nextstep": Checkpoint(
        "nextstep",
        lambda folder: save(nextstep(), folder, autoencoder()),
        settings={"num_inference_steps": 2, "guidance_scale": 2.0},
        wrong={"use_2d_rope": (True, "use_2d_rope")},
    ),
    "llada": masked("llada", weight="model.transformer.ff_out.weight", loaded_as="lm_head.weight"),
    "sdar": masked("sdar"),
    "dream": masked("dream"),
}
if HAS_DIFFUSION_GEMMA:
    CHECKPOINTS["diffusion_gemma"] = Checkpoint(
        "diffusion_gemma", parts(few_steps), weight="model.decoder.norm.weight", wrong=WRONG_TEXT
    )
#: Families without a pipeline of their own: GLM-Image draws in diffusers (`test_glm_image`), and SmolLM2 has
#: no config.
OTHERS = {"glm_image", "smollm2"}


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return CHECKPOINTS[request.param]


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("family") / checkpoint.name
    checkpoint.write(place)
    return place


@pytest.fixture(scope="module")
def pipe(checkpoint: Checkpoint, folder: Path) -> Any:
    return checkpoint.open(folder)


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint, pipe: Any) -> list[Any]:
    """Outputs of plain decoding."""
    pipe.set_accelerator("none")
    return checkpoint.outputs(pipe)


def test_every_family_is_here() -> None:
    ours = {name for name, family in FAMILIES.items() if family.target.startswith("mmspec.")}
    assert {each.family for each in CHECKPOINTS.values()} | OTHERS >= ours


def test_config_alone_tells_the_family(checkpoint: Checkpoint, folder: Path) -> None:
    family_checks.config_alone_tells_the_family(checkpoint, folder)


def test_outputs_are_the_oracles(checkpoint: Checkpoint, pipe: Any, plain: list[Any]) -> None:
    family_checks.outputs_are_the_oracles(checkpoint, pipe, plain)


@pytest.mark.every(3)
def test_rows_are_independent(checkpoint: Checkpoint, pipe: Any, plain: list[Any]) -> None:
    family_checks.rows_are_independent(checkpoint, pipe, plain)


@pytest.mark.every(3)
def test_named_methods_decode(checkpoint: Checkpoint, pipe: Any) -> None:
    family_checks.named_methods_decode(checkpoint, pipe)


@pytest.mark.every(3)
def test_saved_folder_gives_the_same(
    checkpoint: Checkpoint, pipe: Any, plain: list[Any], tmp_path: Path
) -> None:
    family_checks.saved_folder_gives_the_same(checkpoint, pipe, plain, tmp_path / checkpoint.name)


@pytest.mark.every(3)
def test_wrong_weights_are_named(checkpoint: Checkpoint, folder: Path, tmp_path: Path) -> None:
    family_checks.wrong_weights_are_named(checkpoint, folder, tmp_path)


def test_wrong_configs_are_named(checkpoint: Checkpoint, folder: Path, tmp_path: Path) -> None:
    family_checks.wrong_configs_are_named(checkpoint, folder, tmp_path)
