"""Synthetic spectra of random peptides, and the training of CrossNovo (2510.08169) on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from extras.reference.words import OwnLoss
from mmspec.errors import InputError
from mmspec.evaluation.quality.intervals import Estimate, as_share, jackknife
from mmspec.scenes import training_seeds
from mmspec.training.record import write_record
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals
from mmspec_extras.crossnovo import CrossNovo, CrossNovoConfig, Spectra
from mmspec_extras.crossnovo.masses import MASSES, PROTON, RESIDUES, WATER
from reference.trainer import finish

__all__ = ["PeptideBatch", "peptide_batch", "residues_right", "score_peptides", "train_peptides"]

PROGRAM = "python -m extras.reference"
STAGE = 23  # of the seeds of the peptides
LENGTHS = 6, 10
LAST = "KR"  # where trypsin cuts
SEEN = 0.65, 0.75  # shares of the fragments from the start (b) and from the end (y) that give a peak
NOISE_PEAKS, NOISE = 8, 0.005  # number, and dalton of all places
OUTER = ("kinds", "slots", "tokens", "label", "next")
CHECKED, HELD_OUT = 100, 600  # peptides, during the training and at its end
ALONE = {"parallel": 1.0, "autoregressive": 0.0}  # weight of the parallel decoder
JOINT = 2 / 3  # share of the training before encoder and parallel decoder are frozen


class PeptideBatch(NamedTuple):
    """Spectra, their residues [B, L], and the weight of the parallel decoder."""

    spectra: Spectra
    tokens: Tensor
    weight: float = 0.0

    def to(self, device: torch.device) -> PeptideBatch:
        """Move all tensors."""
        spectra = Spectra(*(each.to(device) for each in self.spectra))
        return self._replace(spectra=spectra, tokens=self.tokens.to(device))


def peptide_batch(seeds: Sequence[int]) -> PeptideBatch:
    """Sample peptides of 6 to 10 residues, and spectra of them with noise and missing peaks."""
    peaks, strengths, tokens = list[Tensor](), list[Tensor](), list[Tensor]()
    for seed in seeds:
        noise = np.random.default_rng(seed)
        residues = noise.integers(1, len(MASSES), noise.integers(LENGTHS[0], LENGTHS[1] + 1))
        residues[-1] = 1 + list(RESIDUES).index(LAST[noise.integers(len(LAST))])
        cuts = np.asarray(MASSES)[residues].cumsum()
        ions = np.stack([cuts[:-1] + PROTON, cuts[-1] - cuts[:-1] + WATER + PROTON])
        found = ions[noise.random(ions.shape) < np.array(SEEN)[:, None]]
        place = np.concatenate([found, noise.uniform(50, cuts[-1], NOISE_PEAKS)])
        strength = np.exp(noise.normal(0, 0.5, len(place)) - (np.arange(len(place)) >= len(found)))
        peaks.append(torch.tensor(place + noise.normal(0, NOISE, len(place)), dtype=torch.float32))
        strengths.append(torch.tensor(strength / strength.max(), dtype=torch.float32))
        tokens.append(torch.tensor(residues))
    placed, heights, joined = (pad_sequence(each, batch_first=True) for each in (peaks, strengths, tokens))
    return PeptideBatch(Spectra(placed, heights, torch.tensor(MASSES)[joined].sum(1)), joined)


@flush_subnormals()
def train_peptides(
    out: str | Path,
    *,
    decoders: str = "crossed",
    hidden_size: int = CrossNovoConfig.hidden_size,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a model on new peptides in each step, and save it as a folder.

    Both decoders are trained first; the weight of the parallel one falls from 1 to 0 (importance annealing).
    Then it is frozen with the encoder, and the other one is trained alone (gradient blocking).

    Args:
        out: the folder to write.
        decoders: "crossed", or "parallel" or "autoregressive" to train one alone for as long.
        hidden_size: of the model.
        how: see `RunOptions`; the default is 6 minutes, with 32 peptides per step.

    Returns:
        The folder. Its `training.json` records the training, and the scores with their 95 % intervals.

    Raises:
        InputError: the decoders are not among those named.
    """
    if decoders not in ("crossed", *ALONE):
        raise InputError("decoders", decoders, f"must be crossed, {' or '.join(ALONE)}")
    out = Path(out)
    training = Training(out, how, minutes=6.0, batch_size=32, check_s=600.0)
    model = CrossNovo(CrossNovoConfig(hidden_size=hidden_size, crosses=decoders == "crossed"))

    def make(step: int) -> PeptideBatch:
        seeds = training_seeds(training.seed, STAGE, step, training.stage, training.batch_size)
        annealed = 0.0 if training.stage else 1 - training.progress(JOINT)
        return peptide_batch(seeds.tolist())._replace(weight=ALONE.get(decoders, annealed))

    def check(_: nn.Module) -> dict[str, float]:
        figures = score_peptides(model.eval(), CHECKED)
        model.train()
        return {name: round(right.value, 3) for name, (right, _) in figures.items()}

    for number, share in enumerate((JOINT, 1 - JOINT)):
        if training.stage == number:
            if number and decoders == "crossed":
                model.freeze()
            training.train(Stage(f"{decoders} {1 + number}", OwnLoss(model), make, check, outer=OUTER), share)
            training.stage += 1

    def save(record: dict[str, Any]) -> None:
        scores = {name: list(map(str, ends)) for name, ends in score_peptides(model.eval(), HELD_OUT).items()}
        model.save_pretrained(out)
        write_record(out, record | {"held out": scores})

    options = {"decoders": decoders, "hidden-size": hidden_size, **training.length}
    return finish(training, out, save, command="peptides", options=options, model=model, program=PROGRAM)


def residues_right(found: Sequence[int], truth: Sequence[int]) -> int:
    """Count the residues of a peptide that were found behind the same mass, to half a dalton."""

    def placed(tokens: Sequence[int]) -> list[tuple[float, int]]:
        ends = np.cumsum([MASSES[token] for token in tokens])
        return list(zip(ends.tolist(), tokens, strict=True))

    return sum(
        any(abs(end - other) < 0.5 and token == one for other, one in placed(found))
        for end, token in placed(truth)
    )


@torch.no_grad()
def score_peptides(
    model: CrossNovo, peptides: int, batch_size: int = 100
) -> dict[str, tuple[Estimate, Estimate]]:
    """Score a model on held-out peptides (seeds from 0).

    Returns:
        For each way to decode the shares of right peptides and right residues. For plain and drafted decoding
        by the autoregressive decoder the share of equal outputs, and its forward passes per peptide.
    """
    rows = dict[str, list[tuple[float, float]]]()
    for first in range(0, peptides, batch_size):
        spectra, tokens, *_ = peptide_batch(range(first, min(peptides, first + batch_size)))
        truths = [[token for token in row if token] for row in tokens.tolist()]
        plain, passes = model.sequence(spectra)
        read = {
            "parallel": model.sequence_at_once(spectra, has_mass=False),
            "parallel, with mass": model.sequence_at_once(spectra),
            "autoregressive": plain,
        }
        drafted, fewer = model.sequence(spectra, read["parallel, with mass"])
        for name, found in read.items():
            pairs = list(zip(found, truths, strict=True))
            shares = [residues_right(one, truth) / len(truth) for one, truth in pairs]
            rows.setdefault(name, []).extend(zip([one == truth for one, truth in pairs], shares, strict=True))
        for name, counts in (("plain", passes), ("drafted", fewer)):
            same = [one == other for one, other in zip(plain, drafted, strict=True)]
            rows.setdefault(name, []).extend(zip(same, counts, strict=True))
    return {name: estimates(torch.tensor(each, dtype=torch.float64)) for name, each in rows.items()}


def estimates(rows: Tensor) -> tuple[Estimate, Estimate]:
    """Means of the columns [n, 2], the first of them shares."""
    share, mean = jackknife(lambda chosen: rows[chosen].mean(0).tolist(), len(rows))
    return as_share(share, len(rows)), mean
