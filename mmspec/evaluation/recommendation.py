"""Recommends an accelerator for a model from its folder, its config and a list of published heads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.accelerators import promise_of
from mmspec.assets import own_drafters, shown_path
from mmspec.open_types import Json
from mmspec.plugins import METHODS, family_of, load

__all__ = ["Recommendation", "published_heads", "recommend"]

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
