"""CrossNovo: mass constraints by enumeration, exact drafts, blocked gradients, spectra of peptides."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from extras.reference.peptides import peptide_batch, residues_right, train_peptides
from mmspec.errors import InputError
from mmspec_extras.crossnovo import CrossNovo, CrossNovoConfig, Spectra
from mmspec_extras.crossnovo.masses import MASSES, PROTON, WATER, constrained_path, nominal_mass

TINY = {"hidden_size": 32, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def model() -> CrossNovo:
    """A model whose decoders disagree, and read several residues."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = CrossNovo(CrossNovoConfig(**TINY)).eval()
        for weight in made.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
        made.next.bias.data[0] = made.label.bias.data[0] = -2.0
    return made


def test_a_constrained_path_is_the_most_probable_one_of_its_mass() -> None:
    noise = torch.Generator().manual_seed(1)
    few = [0, 1, 2, 9]  # blank, G, A and N, which has the nominal mass of G and G
    scores = torch.full((5, len(MASSES)), -torch.inf)
    scores[:, few] = torch.randn(5, len(few), generator=noise).log_softmax(-1)
    best = dict[int, tuple[float, list[int]]]()
    for path in product(few, repeat=5):
        read = [now for old, now in zip((0, *path), path, strict=False) if now not in (0, old)]
        total = float(scores[torch.arange(5), torch.tensor(path)].sum())
        nominal = sum(round(MASSES[token]) for token in read)
        best[nominal] = max(best.get(nominal, (-torch.inf, [])), (total, read))
    assert len(best) > 20 and any(1 in read and 9 in read for _, read in best.values())
    for nominal, (_, read) in best.items():
        assert constrained_path(scores, nominal) == read


def test_drafts_change_forward_passes_alone(model: CrossNovo) -> None:
    batch = peptide_batch(range(12))
    plain, passes = model.sequence(batch.spectra)
    assert len({tuple(read) for read in plain}) > 8
    assert passes == [min(len(read) + 1, model.config.most) for read in plain]
    rows = enumerate(plain)
    drafts = {
        "right": plain,
        "wrong": [[1 + token % 19 for token in read] for read in plain],
        "wrong from the third on": [[*read[:2], *(1 + token % 19 for token in read[2:])] for read in plain],
        "too long, too short or empty": [(read + [5] * 12, read[:3], [])[row % 3] for row, read in rows],
    }
    for name, draft in drafts.items():
        drafted, fewer = model.sequence(batch.spectra, draft)
        assert drafted == plain, name
        assert all(few <= many for few, many in zip(fewer, passes, strict=True)), name
        assert (fewer == [1] * 12) is (name == "right")
    alone, _ = model.sequence(Spectra(*(each[3:4] for each in batch.spectra)))
    assert alone == plain[3:4]


def learning(model: CrossNovo, weight: float) -> set[str]:
    """Parts of a model that have gradients."""
    model.zero_grad(set_to_none=True)
    batch = peptide_batch(range(4))
    model.loss(batch.spectra, batch.tokens, weight).backward()
    return {name.split(".")[0] for name, each in model.named_parameters() if each.grad is not None}


def test_the_parallel_decoder_learns_from_the_other_until_it_is_frozen(model: CrossNovo) -> None:
    copied, own = deepcopy(model), {"causal", "next", "tokens"}
    assert learning(copied, 0.0) >= {"encoder", "parallel", "slots", "place", *own}
    assert learning(copied, 1.0).isdisjoint(own) and "label" in learning(copied, 0.5)
    copied.freeze()
    assert learning(copied, 0.0) == own


def test_a_residue_depends_on_those_before_it_and_on_the_parallel_decoder(model: CrossNovo) -> None:
    batch = peptide_batch(range(2))
    memory = model.read(batch.spectra)

    def logits(tokens: Tensor) -> Tensor:
        return model.next_logits(tokens, memory)

    changed = batch.tokens.clone()
    changed[:, 3] = 1 + changed[:, 3] % 19
    differs = (logits(changed) != logits(batch.tokens)).any(-1)
    assert differs[:, 4:].all() and not differs[:, :4].any()
    states = memory.states.clone()
    states[:, -model.config.slots :] += 1
    other = model.next_logits(batch.tokens, memory._replace(states=states))
    assert not torch.allclose(other, logits(batch.tokens))


def test_spectra_have_the_fragments_of_their_peptides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extras.reference.peptides.SEEN", (1.0, 1.0))
    batch = peptide_batch(range(30))
    for peaks, mass, row in zip(*batch.spectra[::2], batch.tokens.tolist(), strict=True):
        read = [token for token in row if token]
        assert 6 <= len(read) <= 10 and abs(sum(MASSES[token] for token in read) - mass) < 1e-3
        assert nominal_mass(float(mass)) == sum(round(MASSES[token]) for token in read)
        for cut in range(1, len(read)):
            b = sum(MASSES[token] for token in read[:cut]) + PROTON
            y = sum(MASSES[token] for token in read[cut:]) + WATER + PROTON
            assert all((peaks - place).abs().min() < 0.03 for place in (b, y))
    assert residues_right([1, 1, 2], [9, 2]) == 1  # G G and N weigh the same, so that A has its place


def test_a_training_saves_a_model_with_the_scores_of_its_decoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in ("CHECKED", "HELD_OUT"):
        monkeypatch.setattr(f"extras.reference.peptides.{count}", 3)
    train_peptides(tmp_path / "one", steps=3, batch_size=2, hidden_size=16)
    record = json.loads((tmp_path / "one" / "training.json").read_text())
    assert [stage["steps"] for stage in record["stages"]] == [2, 1]
    assert record["held out"]["drafted"][0].startswith("1 ")
    assert CrossNovo.from_pretrained(tmp_path / "one").config.crosses
    with pytest.raises(InputError, match="decoders must be crossed"):
        train_peptides(tmp_path / "two", decoders="both")
