"""A checkpoint before its weights are loaded: what it is, and where each keyword goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.accelerators import DraftToCome, build_accelerator, find_preset
from mmspec.errors import CheckpointError, InputError
from mmspec.heads import HEADS
from mmspec.models.adapters import Adapter, base_error, find_adapter
from mmspec.models.checkpoint import check_source, load_config, split_gguf
from mmspec.models.head_checkpoint import load_head
from mmspec.pipelines.loading_keywords import (
    LoadingKeywords,
    config_keywords,
    processor_keywords,
    unknown_keyword,
)
from mmspec.targets.continuous_families import CONTINUOUS_FAMILIES

__all__ = ["Checkpoint", "check_accelerator"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was looked at, and how it is to be loaded.

    Attributes:
        source: local folder or hub id of the model.
        where: keywords of transformers that say which files, for config, processor and model.
        how: those that say how the model is put into memory.
        config: of the model; None where it is to be read from `config_source`.
        config_source: local folder or hub id of the config; "" where the caller gave it.
        adapter: what is put over the model, if anything is.
        options: keywords that are not transformers' own.
        reading: keywords for the processor alone.
    """

    source: str
    where: dict[str, Any]
    how: dict[str, Any]
    config: PreTrainedConfig | None
    config_source: str
    adapter: Adapter | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def look_at(cls, given: object, keywords: Mapping[str, Any]) -> Self:
        """Look at a folder, a hub id, a GGUF file or an adapter.

        Raises:
            CheckpointError: it is missing or damaged.
            InputError: a keyword of transformers that would have no effect, or cannot work here.
            MissingDependencyError: a package that reads it is not installed.
        """
        place, inside = split_gguf(given)
        named = keywords.get("gguf_file")
        if inside and named is not None:
            raise InputError("gguf_file", named, f"nothing: {place} is one already")
        source = check_source(place)
        loading = LoadingKeywords.of({**keywords, **inside})
        where, how = loading.where, {"dtype": "auto", **loading.how}
        adapter = None if "gguf_file" in where else find_adapter(source, **where)
        if adapter is not None:
            source = adapter.base
            apart = {"subfolder", "revision"}
            where = {name: value for name, value in where.items() if name not in apart}
            where |= {} if adapter.revision is None else {"revision": adapter.revision}
        config, config_source = loading.config, source
        if isinstance(config, PreTrainedConfig):
            config_source = ""
        elif config is not None:
            config, config_source = None, check_source(config, "config")
        return cls(source, where, how, config, config_source, adapter, loading.others)

    @contextmanager
    def reading_config(self) -> Iterator[dict[str, Any]]:
        """Yield the keywords for reading the config; an error names the adapter whose base is not there."""
        try:
            pickles, variant = self.how.get("use_safetensors") is False, self.how.get("variant")
            yield {**self.where, "pickles": pickles, "variant": variant}
        except CheckpointError as error:
            raise error if self.adapter is None else base_error(self.adapter, error) from error

    @property
    def folder(self) -> Path:
        """Folder of the files that belong to the model; one that does not exist for a hub id."""
        if self.adapter is not None:
            return self.adapter.folder
        return Path(self.source, self.where.get("subfolder") or "").absolute()

    @property
    def model_config(self) -> PreTrainedConfig:
        """The config, once it was read."""
        if self.config is None:
            raise CheckpointError("config", None, f"that of {self.config_source}")
        return self.config

    def sorted(self, accelerator: str, names: Iterable[str], reader: Callable[[Self], Any]) -> Self:
        """Tell options of an accelerator from keywords of this checkpoint's processor and config.

        Args:
            accelerator: its name, for messages.
            names: those of its options.
            reader: loads the processor, or tokenizer, that may take some; gives None where there is none.

        Raises:
            UnknownArgumentError: nothing knows one of them; the message names what is nearest.
        """
        names = set(names)
        rest = {name: value for name, value in self.options.items() if name not in names}
        if not rest:
            return self
        of_config, processor = config_keywords(self.model_config), reader(self)
        of_processor = set() if processor is None else processor_keywords(processor)
        for name, value in rest.items():
            if name not in of_processor | of_config:
                raise unknown_keyword(name, value, accelerator, names)
        config = self.config
        if changed := {name: value for name, value in rest.items() if name in of_config}:
            if not self.config_source:
                raise InputError(*next(iter(changed.items())), "nothing beside config=..., which says it")
            with self.reading_config() as where:
                config = load_config(self.config_source, **where, **changed)
        return replace(
            self,
            config=config,
            options={name: value for name, value in self.options.items() if name in names},
            reading={name: value for name, value in rest.items() if name in of_processor},
        )

    @property
    def reader(self) -> tuple[str, dict[str, Any]]:
        """Location of the processor or tokenizer, beside an adapter if there, and which files."""
        if self.adapter is not None and self.adapter.has_reader(self.model_config):
            return str(self.adapter.folder), {}
        return self.source, self.where


def check_accelerator(
    found: Checkpoint,
    name: str,
    drafter: str | Path | PreTrainedModel | None,
    *,
    preset: str | None = None,
) -> str | Path | PreTrainedModel | None:
    """Refuse an accelerator that cannot be right whatever the target's weights are, before they are loaded.

    Args:
        found: the checkpoint, with the accelerator's options.
        name: of the accelerator.
        drafter: what drafts for it; None for what belongs to the checkpoint.
        preset: the name of what it is run as, where that is another.

    Returns:
        What drafts for it; a head is loaded by now, since it is small and says more than its folder.

    Raises:
        InputError: a value out of range, an unsound pairing, or a drafter that is missing or has no use.
        CheckpointError: the head cannot be loaded.
    """
    preset = preset or name
    needs = find_preset(preset).needs
    if needs is None:
        if drafter is not None:
            raise InputError("drafter", drafter, f"nothing: accelerator {name!r} has no draft model")
        build_accelerator(preset, **found.options)
        return None
    if drafter is None and name in HEADS and HEADS[name].in_checkpoint:
        drafter = found.source
    if drafter is None:
        raise InputError("drafter", None, f"the folder or id of {needs}, which {name!r} needs")
    if name in HEADS:
        head = load_head(name, drafter, found.model_config)
        build_accelerator(name, model=head, **found.options)
        return head
    family = found.model_config.model_type
    if not isinstance(drafter, PreTrainedModel):
        check_source(drafter, "drafter")
    to_come = DraftToCome(int(family in CONTINUOUS_FAMILIES), family == "mar")
    build_accelerator(name, model=to_come, **found.options)
    return drafter
