"""Reader of EAGLE heads of its authors, and of heads in their layout: MSD's, ViSpec's and LANTERN's.

Their config is that of a target with one layer; each author writes it differently. Only the name of the
folder distinguishes MSD's files from EAGLE's, unless the config has `"visual": "embedded"`.
"""

from __future__ import annotations

import logging
import re

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmspec.errors import CheckpointError
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.heads.published import Found, Layout
from mmspec.methods.eagle.head import EagleConfig
from mmspec.open_types import Json, Keywords
from mmspec.plugins import family_of

__all__ = ["read_eagle"]

logger = logging.getLogger(__name__)

#: LANTERN's names of the conditions on which its drafters for LlamaGen were trained.
CONDITIONS = {"t2i": "caption", "t2i2": "caption", "c2i": "class"}
CELLS = {"t2i": 256, "t2i2": 1024, "c2i": 576}
UNSAID = {"num_key_value_heads": None, "rms_norm_eps": 1e-6}  # defaults of their code
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("hidden_act", "rms_norm_eps"),
)
QUERIES = "compressor.attention.queries"  # of ViSpec's adaptor
PADDING = 128  # llava-hf has 64 tokens more than the LLaVA that MSD's heads were trained for
NORM_OF_HEADS = re.compile(r".*\.self_attn\.([qk])_norm\.(weight|bias)")


def config_of(found: Found) -> EagleConfig:
    """The config of a head; a padded vocabulary fits too, as the head has no weights of that size."""
    stored, tensors, given = found.stored, found.tensors, axes(found.text)
    named = re.search(r"\bMSD\b", str(found.path.parent))
    settings: Keywords = {
        "bias": "fc.bias" in tensors,
        "input_norm": "decoder.layers.0.input_layernorm.weight" in tensors,
        "visual": stored.get("visual", "embedded" if named else "fused"),
        "own_embedding": is_lantern(stored),
    }
    text, queries = layer_described(stored, found.target), tensors.get(QUERIES)
    if queries is not None and queries.dim() == 3:
        settings |= {"visual": "embedded", "compressor": "vispec"}
        settings["compressor_options"] = {
            "tokens": queries.shape[0] - 1,
            "heads": queries.shape[1],
            "bias": "compressor.attention.k_proj.bias" in tensors,
        }
    if queries is not None:
        tensors[QUERIES] = queries.transpose(0, 1)  # theirs are [queries, heads, width of a head]
        if axes(text) is None and given:
            # the release counts tokens: on equal axes the sections do not matter
            text.rope_parameters = {**text.rope_parameters, "mrope_section": given}
            settings["one_axis"] = True
    made = EagleConfig.for_target(text, int(text.vocab_size), **settings)
    made.target_layers = 0  # the file's number counts the head's own layers
    padded = int(found.text.vocab_size)
    if 0 <= padded - made.vocabulary < PADDING and not made.own_embedding:
        made.vocabulary = padded
    family = family_of(text)
    if family is not None and family.compact:  # heads of any vocabulary fit
        made.vocabulary = 0
    check_axes(found, made, queries is not None)
    repeat_norms(tensors, made.layer_config())
    return made


def is_lantern(stored: Json) -> bool:
    """Return whether a config.json is that of a drafter of LANTERN for LlamaGen (2410.03355)."""
    return stored.get("model_type") == "llama" and stored.get("input_type") in CONDITIONS


def layer_described(stored: Json, target: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the language model whose layer the head has.

    Its sizes may be listed beside `model_type`, although transformers nests them for that type; they are
    those of the language model in either case (MSD, ViSpec).
    """
    text = target.get_text_config(decoder=True)
    if is_lantern(stored):
        return _layer_of_llamagen(stored, text)
    table = {name: value for name, value in stored.items() if name not in ("model_type", "visual")}
    kind = str(stored.get("model_type"))
    parts = CONFIG_MAPPING[kind].sub_configs if kind in CONFIG_MAPPING else {}
    if "text_config" in parts and "text_config" not in table and "hidden_size" in table:
        usual = CONFIG_MAPPING[kind]().get_text_config(decoder=True).model_type
        kind = text.model_type if kind == target.model_type else usual
        table = {name: value for name, value in table.items() if not name.endswith("_config")}
    return AutoConfig.for_model(kind, **table).get_text_config(decoder=True)


def _layer_of_llamagen(stored: Json, text: PreTrainedConfig) -> PreTrainedConfig:
    """The config of LlamaGen's own layer with the stored sizes; its positions are those of the target."""
    condition = CONDITIONS[stored["input_type"]]
    if not isinstance(text, LlamaGenConfig) or text.condition_type != condition:
        kind = stored["input_type"]
        raise ValueError(f"input_type {kind!r} needs a LlamaGen that is conditioned on a {condition}")
    side = round(CELLS[stored["input_type"]] ** 0.5)
    if text.grid_size != side:
        logger.warning(
            "The drafter was trained for images of %d x %d cells, and this target's have %d x %d; fewer of "
            "its drafts will be accepted.",
            *(side, side, text.grid_size, text.grid_size),
        )
    sizes = {name: stored[name] for name in SIZES if name in stored}
    return LlamaGenConfig(**{**text.to_dict(), **UNSAID, **sizes})


def repeat_norms(tensors: dict[str, Tensor], layer: PreTrainedConfig) -> None:
    """Repeat norms of queries and keys that Lumina-mGPT stores once for several heads, for each of them."""
    heads = {"q": layer.num_attention_heads, "k": getattr(layer, "num_key_value_heads", None)}
    for name, norm in tensors.items():
        match = NORM_OF_HEADS.fullmatch(name)
        count = (heads[match[1]] or heads["q"]) if match and norm.dim() == 2 else 0
        if count and norm.shape[0] and count % norm.shape[0] == 0:
            tensors[name] = norm.repeat_interleave(count // norm.shape[0], 0)


def check_axes(found: Found, config: EagleConfig, is_vispec: bool) -> None:
    """Raise CheckpointError for a head whose positions have other axes than the target's.

    ViSpec's authors trained their heads for Qwen-VL with positions of one axis. A head whose config has
    sections runs with three, with a warning: wrong positions lower the acceptance, but do not change the
    output.
    """
    own, given, name = axes(config.layer_config()), axes(found.text), found.path.parent.name
    if own != given:
        rule = f"must have positions as this target's, whose M-RoPE sections are {given}"
        raise CheckpointError("drafter", f"{name}: M-RoPE sections {own}", rule)
    if is_vispec and given is not None and not config.one_axis:
        logger.warning(
            "%s was trained with positions of one axis and runs with this target's three; fewer of its "
            "drafts will be accepted. `mmspec train drafter --method vispec` trains a head for three axes.",
            name,
        )


def axes(config: PreTrainedConfig) -> list[int] | None:
    """The M-RoPE sections of a language model; None if its positions have one axis."""
    sections: list[int] | None = (getattr(config, "rope_parameters", None) or {}).get("mrope_section")
    return sections


EAGLE_3 = "must be an EAGLE-1 or EAGLE-2 head; use accelerator='eagle3' for this EAGLE-3 head"
read_eagle = Layout(
    what="an EAGLE head, with the config of a target of one layer",
    config=config_of,
    names=(
        (r"layers\.(.*)", r"decoder.layers.\1"),
        (r"imadpt\.q", QUERIES),
        (r"imadpt\.(.*)", r"compressor.attention.\1"),
    ),
    marks=({"fc.weight", "layers.0.self_attn.q_proj.weight"},),
    foreign={
        "layers.ar_proj.0.weight": "must be an EAGLE-1 or EAGLE-2 head; FLASH's released block head cannot "
        "be run: train one with `mmspec train drafter --method flash`",
        "layers.0.hidden_norm.weight": EAGLE_3,
        "midlayer.hidden_norm.weight": EAGLE_3,
    },
)
