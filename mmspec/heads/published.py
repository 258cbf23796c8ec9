"""Layouts of published heads as tables, and readers of the fields that many of their configs share.

A layout defines how to recognise a folder of its kind, how to rename each tensor, and how to make a config
from its config.json and its tensors. A field that changes the computation of a layer is either applied or
raises an error with its name. Fields that are known to have no effect are listed here; any other field
raises an error too, unless it is empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import MODEL_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel

from mmspec.errors import CheckpointError
from mmspec.heads.configuration import HeadConfig
from mmspec.heads.layers import AXES, FULL, KNOWN, MORE, PART, SCALINGS, SLIDING
from mmspec.models.checkpoint import first_line
from mmspec.models.official_files import (
    fill,
    find_file,
    find_tensors,
    measure,
    open_checkpoint,
    read_config,
    tensor_names,
)
from mmspec.open_types import Json, Keywords
from mmspec.validation import is_integer

__all__ = ["Found", "Layout", "add_words", "level_sizes", "read_layer", "read_windows", "table_of_layer"]

LEVEL_OUTPUT = r"lm_heads\.\d+\.weight"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a folder of transformers
# embeddings are the target's; old versions of transformers stored tables of the rotary embedding
NOT_OWN = r"embed_tokens\.weight|.*\.rotary_emb\..*"
LAYER = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "attention_bias", "mlp_bias"),
    *("rope_theta", "rope_scaling", "rope_parameters", PART, KNOWN),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
# fields of generation, training and targets; the weights show sizes, experts and norms of queries
NO_EFFECT = {
    *PreTrainedConfig().to_dict(),
    *GenerationConfig().to_dict(),
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "modal_type"),
    *("target_model", "target_model_type", "target_model_name_or_path", "target_text_model_type"),
    *("attention_backend", "attention_dropout", "initializer_range", "pretraining_tp", "use_cache"),
    *("loss_decay_gamma", "max_anchors", "num_anchors", "step_loss_decay", "ttt_length"),
    *("attention_head_dim", "cla_share_factor", "dense_list", "draft_num_hidden_layers", "draft_vocab_size"),
    *("max_position_embeddings", "org_vocab_size", "pool_type", "target_hidden_size", "use_qk_norm"),
    *("decoder_sparse_step", "moe_intermediate_size", "mlp_only_layers", "norm_topk_prob", "num_experts"),
    *("num_experts_per_tok", "num_local_experts", "parallel_draft_heads_num_layers", "router_aux_loss_coef"),
    *("tie_word_embeddings", "transformers_version"),
}
NEUTRAL: Mapping[str, object] = {  # fields of other layers, and the value at which they have no effect
    "attention_value_scale": 1,
    "causal": True,
    "embedding_multiplier": 1,
    "has_lm_head": True,
    "is_causal": True,
    "is_neox_style": True,
    "logit_scale": 1,
    "next_layer_regular": True,
    "norm_type": "rms",
    "parallel_draft_step": 1,
    "residual_multiplier": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_rotary_pos_emb": True,
}


@dataclass(frozen=True)
class Found:
    """Content of a published folder.

    Attributes:
        path: file of the weights, or the index of their shards.
        stored: the config.json; {} if the layout does not use it.
        tensors: by the head's own names. A layout's `config` may add and remove some.
        target: config of the target that the head drafts for.
    """

    path: Path
    stored: Json
    tensors: dict[str, Tensor]
    target: PreTrainedConfig

    @property
    def file(self) -> Path:
        """Path of the config.json."""
        return self.path.parent / "config.json"

    @property
    def text(self) -> PreTrainedConfig:
        """The config of the target's language model."""
        return self.target.get_text_config(decoder=True)

    @property
    def layers(self) -> int:
        """Number of layers of the target's language model."""
        return int(self.text.num_hidden_layers)

    def size(self, pattern: str, axis: int = 0) -> int:
        """Size of the tensors whose whole name matches, as in `measure`."""
        return measure(self.path, self.tensors, pattern, axis)

    def count(self, pattern: str) -> int:
        """Number of the tensors whose whole name matches."""
        return sum(bool(re.fullmatch(pattern, name)) for name in self.tensors)


@dataclass(frozen=True)
class Layout:
    """A layout in which heads are published. Calling it with a folder reads the head.

    Attributes:
        what: a head of this kind in words, for messages; {layers} in it is the target's number of layers.
        config: makes the config of the head, which determines its class; None for a folder of another kind.
        names: pattern of a whole published name, and the head's own name, which may refer to its groups. The
            first match counts; a name without a match stays.
        marks: sets of published names; a folder of this kind has all names of one of them.
        foreign: names of other layouts that share marks with this one, and the rule of the error message.
        files: possible names of the file of the weights.
        has_config: whether the config.json is used.
        ignored: pattern of names that may be present and are not needed.
    """

    what: str
    config: Callable[[Found], HeadConfig | None]
    names: Sequence[tuple[str, str]]
    marks: Sequence[Collection[str]] = ((),)
    foreign: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[str] = WEIGHTS
    has_config: bool = True
    ignored: str = NOT_OWN

    def __call__(self, folder: Path, target: PreTrainedConfig) -> PreTrainedModel | None:
        """Read the head in a folder for a target; None if it is of another kind.

        Raises:
            CheckpointError: a file is damaged; the head is of another method, or for another target; its
                config has an unsupported field; or keys are missing, unknown or of another shape.
        """
        path = find_file(folder, self.files)
        if path is None:
            return None
        names = self.names_in(path)
        for name, problem in self.foreign.items():
            if name in names:
                raise CheckpointError("drafter", str(folder), problem)
        if not self.is_marked(names):
            return None
        tensors = {
            self.own_name(name): each for name, each in find_tensors(path, open_checkpoint(path)).items()
        }
        found = Found(path, read_config(folder) if self.has_config else {}, tensors, target)
        try:
            config = self.config(found)
        except CheckpointError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as error:
            rule = f"must be {self.what.format(layers=found.layers)} ({first_line(error)})"
            raise CheckpointError("drafter", str(found.file if self.has_config else path), rule) from error
        if config is None:
            return None
        made: Any = MODEL_MAPPING[type(config)]
        head: PreTrainedModel = made(config)
        fill(path, head, tensors, self.ignored)
        return head

    def holds(self, folder: Path) -> bool:
        """Return whether a folder holds a head of this layout, by its files and the names of its tensors.

        Raises:
            CheckpointError: a file is damaged.
        """
        path = find_file(folder, self.files)
        names = set() if path is None else self.names_in(path)
        return path is not None and self.is_marked(names) and not names & self.foreign.keys()

    def names_in(self, path: Path) -> set[str]:
        """Return the published names in a file, if they distinguish this layout from others."""
        return tensor_names(path) if self.foreign or any(self.marks) else set()

    def is_marked(self, names: set[str]) -> bool:
        """Return whether published names are those of a folder of this kind."""
        return any(names.issuperset(mark) for mark in self.marks)

    def own_name(self, name: str) -> str:
        """Return the head's own name of a published tensor."""
        for pattern, own in self.names:
            if match := re.fullmatch(pattern, name):
                return match.expand(own)
        return name


def table_of_layer(found: Found, parts: Sequence[Mapping[str, object]], obeyed: Collection[str]) -> Keywords:
    """Return a copy of the config of a head's layers, after a check of all fields except `obeyed`.

    Where each type of layers has its own rotary positions (`rope_parameters` of Gemma or Laguna, copied into
    a head's config), those of sliding layers are used for all, as in speculators.

    Raises:
        CheckpointError: a field is not supported and might change the computation, or rotary positions are
            not a table.
    """
    for name, value in (item for part in parts for item in part.items()):
        if name in obeyed:
            continue
        if name in NEUTRAL:
            if value is not None and value != NEUTRAL[name]:
                rule = f"must be {NEUTRAL[name]}: heads with another value are not supported"
                raise CheckpointError(f"{found.file}: {name}", value, rule)
        elif value and not {name} & {*LAYER, *NO_EFFECT} and not name.endswith("_id"):
            rule = "must be absent: this field is not supported and may change the output of the head"
            raise CheckpointError(f"{found.file}: {name}", value, rule)
    table: Json = deepcopy(dict(found.stored.get("transformer_layer_config", found.stored)))
    for name in ("rope_parameters", "rope_scaling"):
        rope = table.get(name)
        if rope is not None and not isinstance(rope, dict):
            raise CheckpointError(f"{found.file}: {name}", rope, "must be a table, or null")
        own = [rope[kind] for kind in (SLIDING, FULL) if kind in rope] if rope else []
        if own:
            table[name] = own[0]
    return table


def read_layer(file: Path, shape: Any) -> Keywords:
    """Return the settings of a `PublishedLayerConfig` from the transformers config of the layer."""
    rope = dict(getattr(shape, "rope_parameters", None) or {})
    kind, theta = rope.pop("rope_type", None) or "default", rope.pop("rope_theta", None)
    rope.pop("type", None)
    section = rope.get("mrope_section")
    if kind not in SCALINGS or (kind == "mrope") > bool(section):
        rule = f"must be one of {', '.join(SCALINGS)}; types that depend on the length are not supported"
        raise CheckpointError(f"{file}: rope_type", kind, rule)
    numbers = {name: value for name, value in rope.items() if value is not None and name not in AXES}
    for name, value in numbers.items():
        if name not in (PART, *SCALINGS[kind], *MORE.get(kind, ())):
            rule = f"must have no {name} with {kind} rotary positions"
            raise CheckpointError(f"{file}: rope_parameters", value, rule)
    if numbers.get(PART) == 1:
        del numbers[PART]
    plain = kind in ("default", "mrope")
    return {
        "hidden_size": int(shape.hidden_size),
        "intermediate_size": int(shape.intermediate_size),
        "num_attention_heads": int(shape.num_attention_heads),
        "num_key_value_heads": int(shape.num_key_value_heads),
        "head_dim": int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads),
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": float(shape.rms_norm_eps),
        "rope_theta": float(theta or 10000.0),
        "rotary": numbers if plain else {"rope_type": kind, **numbers},
    }


def read_windows(file: Path, table: Json, shape: Any, layers: int) -> tuple[list[str], int | None]:
    """Return the type of each layer, `FULL` or `SLIDING`, and the window, None if no layer has one.

    `sliding_window` alone has no effect, as configs copy the target's. `layer_types` lists the layers that
    have it, or else `use_sliding_window` with `max_window_layers`, as in transformers.

    Raises:
        CheckpointError: a type is unknown, their number differs, or the window is not a number of tokens.
    """
    types, used = table.get("layer_types"), table.get("use_sliding_window")
    if not types and used and table.get("sliding_window") is not None:
        known = getattr(shape, "layer_types", None)
        first = int(table.get("max_window_layers") or 0)
        types = known or [SLIDING if index >= first else FULL for index in range(layers)]
    types = list(types or [FULL] * layers)
    if len(types) != layers or not {*types} <= {FULL, SLIDING}:
        rule = f"must be {FULL} or {SLIDING} for each of {layers} layers"
        raise CheckpointError(f"{file}: layer_types", types, rule)
    if SLIDING not in types:
        return types, None
    window: Any = table.get("sliding_window")
    if not is_integer(window) or window < 1:
        rule = "must be a number of tokens, as there are layers with sliding attention"
        raise CheckpointError(f"{file}: sliding_window", window, rule)
    if used is False:
        rule = f"must be true, as layer_types has {SLIDING}"
        raise CheckpointError(f"{file}: use_sliding_window", used, rule)
    return types, int(window)


def add_words(path: Path, tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Check the tables of a reduced vocabulary, and add `t2d` if it is missing.

    Raises:
        CheckpointError: a token is not one of the target, is there twice, or is in one table alone.
    """
    offsets = tensors.get("d2t")
    if offsets is None or offsets.dim() != 1:
        return  # `fill` reports the missing table
    tokens = torch.arange(len(offsets), device=offsets.device) + offsets
    known = torch.zeros(vocabulary, dtype=torch.bool, device=offsets.device)
    if tokens.min() >= 0 and tokens.max() < vocabulary:
        known[tokens] = True
    if int(known.sum()) != len(tokens):
        rule = f"must lead to different tokens from 0 to {vocabulary - 1}"
        raise CheckpointError(f"{path}: d2t", tokens.tolist(), rule)
    if not torch.equal(tensors.setdefault("t2d", known).bool(), known):
        rule = "must mark the tokens that d2t leads to"
        raise CheckpointError(f"{path}: t2d", tensors["t2d"], rule)


def level_sizes(found: Found) -> Keywords:
    """Return the settings of heads for one level each (Medusa, Hydra), with their own output matrices."""
    return {
        "vocabulary": found.size(LEVEL_OUTPUT),
        "hidden_size": found.size(LEVEL_OUTPUT, axis=1),
        "num_heads": found.count(LEVEL_OUTPUT),
        "own_lm_heads": True,
    }
