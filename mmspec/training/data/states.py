"""On-disk cache of the hidden states of a frozen target, shared by trainings on the same sequences."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.accelerators.tuned import fingerprint
from mmspec.atomic_file import atomic_file
from mmspec.errors import InputError
from mmspec.heads.model import EMBEDDINGS
from mmspec.targets import CausalTarget
from mmspec.targets.prefix import media_of

__all__ = ["StoredStates", "Summary"]

logger = logging.getLogger(__name__)

TARGET = "target.json"  # identifies the target whose states the folder stores
TABLE = {"embeddings": "table"}  # metadata of files without embeddings: the target's table has the same bits


class Summary(NamedTuple):
    """Summary of a target's logits over the whole vocabulary at positions [..].

    Attributes:
        likeliest: [..] the likeliest token.
        total: [..] log-sum-exp of the logits, which normalizes a logit to a log-probability.
    """

    likeliest: Tensor
    total: Tensor


class StoredStates:
    """A target's hidden states of sequences, loaded from a folder, or computed and stored there.

    Each sequence has one file, in the target's dtype, and a second one if logits are summarized. Several
    processes may share the folder. The states depend in their last bits on the batch in which they were
    computed, because padding changes rounding.

    Args:
        target: the frozen target.
        folder: a new folder, or one with states of the same weights, dtype and device type.

    Raises:
        InputError: the folder belongs to another target, or cannot be written.
    """

    def __init__(self, target: CausalTarget, folder: str | Path) -> None:
        self.target, self.folder = target, Path(folder)
        self.own = {
            "model": type(target.model).__name__,
            "dtype": str(target.dtype)[6:],
            "device": target.device.type,
            "fingerprint": fingerprint(target.model),
        }
        path = self.folder / TARGET
        try:
            if not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                with atomic_file(path) as temporary:
                    temporary.write_text(json.dumps(self.own) + "\n", encoding="utf-8")
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._refusal(f"must be a folder of hidden states, or a new one ({error})") from error
        if found != self.own:
            rule = f"must be a new folder, or one of this target's states ({self.own}); it has {found}"
            raise self._refusal(rule)

    @torch.no_grad()
    def read(self, sequences: Sequence[Mapping[str, Tensor]], taps: Sequence[int]) -> dict[int, Tensor]:
        """Return the hidden states of whole sequences, like `CausalTarget.read`: tap -> [B, L, d].

        The target processes the sequences that lack a tap in one batch.

        Raises:
            InputError: the states cannot be stored.
        """
        paths = [self.folder / f"{self._key(inputs)}.safetensors" for inputs in sequences]
        rows = [self._load(path, inputs) for path, inputs in zip(paths, sequences, strict=True)]
        lacking = [row for row, states in enumerate(rows) if not set(taps) <= states.keys()]
        if lacking:
            read = self.target.read([sequences[row] for row in lacking], taps)
            for place, row in enumerate(lacking):
                length = sequences[row]["input_ids"].shape[1]
                rows[row] |= {tap: states[place, :length] for tap, states in read.items()}
                self._store(paths[row], sequences[row], rows[row])
        device = self.target.device
        return {tap: pad_sequence([row[tap].to(device) for row in rows], batch_first=True) for tap in taps}

    @torch.no_grad()
    def summary(self, sequences: Sequence[Mapping[str, Tensor]], states: Tensor) -> Summary:
        """Return the summary [B, L] of the target's logits for final hidden states [B, L, d] of sequences.

        Raises:
            InputError: the summary cannot be stored.
        """
        rows = []
        for inputs, hidden in zip(sequences, states, strict=True):
            path = self.folder / f"{self._key(inputs)}-summary.safetensors"
            row, _ = self._open(path)
            if not row:
                logits = self.target.head(hidden[: inputs["input_ids"].shape[1]]).float()
                row = Summary(logits.argmax(-1), logits.logsumexp(-1))._asdict()
                self._write(path, row)
            rows.append([row[name].to(states.device) for name in Summary._fields])
        return Summary(*(pad_sequence(list(each), batch_first=True) for each in zip(*rows, strict=True)))

    def _key(self, inputs: Mapping[str, Tensor]) -> str:
        """A hash of the target and of all inputs of a sequence."""
        digest = hashlib.sha256(self.own["fingerprint"].encode())
        for name, value in sorted(inputs.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:40]

    def _load(self, path: Path, inputs: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """The stored states of a sequence, tap -> [L, d]; none if the file is damaged."""
        tensors, metadata = self._open(path)
        states = {int(tap): each for tap, each in tensors.items()}
        return states | ({EMBEDDINGS: self.target.embed(inputs["input_ids"])[0]} if metadata == TABLE else {})

    def _open(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
        """The tensors and metadata of a file; none if it does not exist or is damaged."""
        try:
            with safe_open(path, "pt") as file:  # memory-mapped: only the tensors that are used are read
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        except FileNotFoundError:
            return {}, None
        except SafetensorError as error:
            logger.warning("%s is damaged (%s); the states of its sequence are computed again", path, error)
            return {}, None

    def _store(self, path: Path, inputs: Mapping[str, Tensor], states: Mapping[int, Tensor]) -> None:
        """Write the states of a sequence, tap -> [L, d]; embeddings only if they differ from the table's."""
        by_table = (
            EMBEDDINGS in states
            and not media_of(inputs)
            and torch.equal(states[EMBEDDINGS], self.target.embed(inputs["input_ids"])[0])
        )
        kept = {str(tap): each for tap, each in states.items() if tap != EMBEDDINGS or not by_table}
        self._write(path, kept, TABLE if by_table else None)

    def _write(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
    ) -> None:
        """Write a file atomically."""
        kept = {name: each.cpu().contiguous() for name, each in tensors.items()}
        try:
            with atomic_file(path) as temporary:
                save_file(kept, temporary, metadata)
        except (OSError, SafetensorError) as error:
            raise self._refusal(f"must be a writable folder with free space ({error})") from error

    def _refusal(self, rule: str) -> InputError:
        return InputError("states", str(self.folder), rule)
