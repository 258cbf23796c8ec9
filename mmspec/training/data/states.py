"""Hidden states of a frozen target on training sequences, kept in a folder for the trainings that follow."""

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

TARGET = "target.json"  # whose states a folder holds
TABLE = {"embeddings": "table"}  # of a file without them: the target's table gives the same bits


class Summary(NamedTuple):
    """Summary of a target's logits of all tokens at places [..].

    Attributes:
        likeliest: [..] the likeliest token.
        total: [..] logarithm of the sum of all exponentials, by which a logit is a probability.
    """

    likeliest: Tensor
    total: Tensor


class StoredStates:
    """A target's hidden states of sequences: from a folder where they are known, and stored where not.

    Each sequence is a file, in the target's number format, and one of its logits where they are asked for;
    several processes may share the folder. States of a sequence depend on those that it was read beside, in
    their last bits, for padding changes rounding.

    Args:
        target: frozen.
        folder: new, or with states of the same weights in the same format on the same kind of device.

    Raises:
        InputError: the folder is another target's, or cannot be written.
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
            raise self._refusal(f"a folder of hidden states, or a new one ({error})") from error
        if found != self.own:
            raise self._refusal(f"a folder of this target's states, {self.own}, or a new one; it has {found}")

    @torch.no_grad()
    def read(self, sequences: Sequence[Mapping[str, Tensor]], taps: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states of whole sequences, as `CausalTarget.read` gives them: tap -> [B, L, d].

        The target reads those that lack a tap, together.

        Raises:
            InputError: they cannot be stored.
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
        """Summary [B, L] of the target's logits at final hidden states [B, L, d] of sequences.

        Raises:
            InputError: it cannot be stored.
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
        """A name for a sequence by all that the target is told, and by the target."""
        digest = hashlib.sha256(self.own["fingerprint"].encode())
        for name, value in sorted(inputs.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:40]

    def _load(self, path: Path, inputs: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """The states of a sequence that are stored, tap -> [L, d]; a damaged file has none."""
        tensors, metadata = self._open(path)
        states = {int(tap): each for tap, each in tensors.items()}
        return states | ({EMBEDDINGS: self.target.embed(inputs["input_ids"])[0]} if metadata == TABLE else {})

    def _open(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
        """The tensors and metadata of a file; none where there is no file, or a damaged one."""
        try:
            with safe_open(path, "pt") as file:  # mapped into memory: what is not used is not read
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        except FileNotFoundError:
            return {}, None
        except SafetensorError as error:
            logger.warning("%s is damaged (%s): its sequence is read anew", path, error)
            return {}, None

    def _store(self, path: Path, inputs: Mapping[str, Tensor], states: Mapping[int, Tensor]) -> None:
        """Write the states of a sequence, tap -> [L, d]; embeddings only if the table does not give them."""
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
        """Write a file, whole or not at all."""
        kept = {name: each.cpu().contiguous() for name, each in tensors.items()}
        try:
            with atomic_file(path) as temporary:
                save_file(kept, temporary, metadata)
        except (OSError, SafetensorError) as error:
            raise self._refusal(f"a folder that can be written, with room ({error})") from error

    def _refusal(self, allowed: str) -> InputError:
        return InputError("states", str(self.folder), allowed)
