"""Recommends an accelerator for a model from its folder, its config and a list of published heads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from mmspec.accelerators import promise_of
from mmspec.assets import own_drafters, shown_path
from mmspec.errors import CheckpointError, MMSpecError
from mmspec.heads.checkpoint import heads_in, load_head
from mmspec.methods.draft_model.drafter import NAME, mask_token_of
from mmspec.models.checkpoint import check_source, first_line, split_gguf
from mmspec.open_types import Json
from mmspec.plugins import METHODS, family_of, load, register_families

__all__ = ["Recommendation", "examine_head", "published_heads", "recommend"]

LIST = Path(__file__).resolve().parents[1] / "heads.json"
#: Names under which configs of transformers count the layers that predict several tokens.
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class Recommendation:
    """An accelerator for a model.

    Attributes:
        accelerator: as the command line writes it; None where nothing drafts.
        drafter: folder or hub id of its drafter, if it needs one.
        reason: one sentence.
        command: the next command to run.
        others: further drafters that were published for the model, as "accelerator: drafter".
    """

    accelerator: str | None
    drafter: str | None
    reason: str
    command: str
    others: tuple[str, ...] = ()


def published_heads(model: str) -> list[Json]:
    """The entries of `heads.json` for a hub id, or for a folder of the same name."""
    name = Path(model).name.lower()
    heads: list[Json] = json.loads(LIST.read_text(encoding="utf-8"))["heads"]
    return [head for head in heads if head["target"].rpartition("/")[2].lower() == name]


def config_of(source: str) -> PreTrainedConfig:
    """Read the config of a folder, hub id or GGUF file, whose weights need not be there.

    Raises:
        CheckpointError: it does not exist, or transformers does not support it.
    """
    place, inside = split_gguf(source)
    folder = check_source(place)
    try:
        register_families()
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **inside)
    except (OSError, ValueError) as error:
        rule = f"must be a folder or hub id with a config ({first_line(error)})"
        raise CheckpointError("model", source, rule) from error
    return config


def examine_head(folder: str, model: str) -> Json:
    """Check the folder of a head against the list of published heads, and against its target.

    Args:
        folder: of the head, with the name of its repository.
        model: folder or hub id of the target; only its config is read.

    Returns:
        `accelerators` that may run the head, its entry `listed` or None, and `ok`, with the `problem` if not.

    Raises:
        CheckpointError: the config of the model or of the head cannot be read.
    """
    name = Path(folder).name.lower()
    entries: list[Json] = json.loads(LIST.read_text(encoding="utf-8"))["heads"]
    listed = [head for head in entries if head["drafter"].rpartition("/")[2].lower() == name]
    entry = next((head for head in listed if head in published_heads(model)), next(iter(listed), None))
    found: Json = {"head": folder, "model": model, "accelerators": [], "listed": entry, "problem": None}
    config, problems = config_of(model), dict[str, str]()
    kinds = heads_in(Path(folder))
    for kind in kinds:  # published DFlash and DSpark heads differ in their configs alone
        try:
            found["problem"] = misfit(load_head(kind, folder, config).config, config)
            found["accelerators"].append(kind)
        except MMSpecError as error:
            problems[kind] = str(error)
    if not kinds and mask_token_of(config_of(folder)) is not None:
        found["accelerators"] = [NAME]
    elif not found["accelerators"]:
        known = problems.get(entry["accelerator"]) if entry else None
        none = "must be a head, or a draft model with pard_token"
        found["problem"] = known or next(iter(problems.values()), none)
    if found["problem"] is None and entry is not None:
        if entry["accelerator"] not in found["accelerators"]:
            found["problem"] = f"must be a head for {entry['accelerator']!r}, as it is listed"
        elif entry not in published_heads(model):
            found["problem"] = f"must have the target {entry['target']}, as it is listed"
    return found | {"ok": found["problem"] is None}


def misfit(head: Any, target: Any) -> str | None:
    """Return how the config of a head differs from that of its target, in words; None if it fits."""
    text = target.get_text_config(decoder=True)
    for own, name in (("hidden_size", "hidden_size"), ("target_layers", "num_hidden_layers")):
        trained, given = getattr(head, own, 0), getattr(text, name)
        if trained and trained != given:
            return f"must be a head for this target, whose {name} is {given}; got one for {trained}"
    return None


def recommend(source: str, config: Any) -> Recommendation:
    """Recommend an accelerator without loading the weights.

    The first of these that applies: a drafter that the model's folder names, a published head, layers for
    multi-token prediction in the checkpoint, the first exact accelerator of the model's family, and `copy`.

    Args:
        source: folder or hub id of the model.
        config: its config, of transformers.
    """
    own = own_drafters(source)
    if own.entries:
        label = own.default or next(iter(own.entries))
        one = own.entries[label]
        reason = f"{own.path.name} in the model's folder names this drafter"
        drafter = None if one.folder is None else shown_path(one.folder)
        return _checked(source, one.accelerator, drafter, reason)
    if heads := published_heads(source):
        first, *others = heads
        reason = f"this head was published for {first['target']}; mmspec has not measured it"
        more = tuple(f"{head['accelerator']}: {head['drafter']}" for head in others)
        return _checked(source, first["accelerator"], first["drafter"], reason, more)
    text = config.get_text_config(decoder=True)
    if any(getattr(text, name, 0) for name in MTP_LAYERS):
        return _checked(source, "mtp", None, "the checkpoint has layers for multi-token prediction")
    family = family_of(config)
    target = None if family is None else load(family.target)
    compared = [one for one in getattr(target, "compared", ()) if one != "none"]
    if compared:
        exact = (one for one in compared if promise_of(METHODS[one.partition(":")[0]])[0] == "exact")
        name = next(exact, compared[0])
        return _checked(source, name, None, "it needs no drafter, and fits how this model generates")
    if family is not None and family.draws:
        return _checked(source, "sjd", None, "image tokens need no drafter: the model drafts for itself")
    return Recommendation(
        "copy",
        None,
        "no drafter is known for this model. copy is faster where answers repeat the prompt (documents, "
        "code, edits); for other answers, train a head",
        f"mmspec train drafter --target {source} --method eagle3 --out my-head",
    )


def _checked(
    source: str, accelerator: str, drafter: str | None, reason: str, others: tuple[str, ...] = ()
) -> Recommendation:
    """A recommendation whose next command compares the accelerator with plain decoding."""
    named = "" if drafter is None else f" --drafter {drafter}"
    command = f"mmspec check {source} --accelerator {accelerator}{named}"
    return Recommendation(accelerator, drafter, reason, command, others)
