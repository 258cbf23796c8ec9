"""Monoisotopic masses in dalton of residues, fragments and peptides, and the most probable path of a mass."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MASSES", "PROTON", "RESIDUES", "WATER", "constrained_path", "nominal_mass"]

#: The residues by letter; isoleucine has the mass of leucine (L), so that a spectrum cannot tell them apart.
RESIDUES = {
    **{"G": 57.02146, "A": 71.03711, "S": 87.03203, "P": 97.05276, "V": 99.06841, "T": 101.04768},
    **{"C": 103.00919, "L": 113.08406, "N": 114.04293, "D": 115.02694, "Q": 128.05858, "K": 128.09496},
    **{"E": 129.04259, "M": 131.04049, "H": 137.05891, "F": 147.06841, "R": 156.10111, "Y": 163.06333},
    "W": 186.07931,
}
#: Masses by token; token 0 is the blank of a parallel decoder, and the end of a peptide.
MASSES = [0.0, *RESIDUES.values()]
WATER, PROTON = 18.01056, 1.00728
DEFECT = 1.0005  # mean mass of a residue per unit of its nominal mass


def nominal_mass(mass: float) -> int:
    """Sum of the nominal (integer) masses of residues of a mass."""
    return round(mass / DEFECT)


def constrained_path(scores: Tensor, nominal: int) -> list[int]:
    """Return the residues of the most probable path of a parallel decoder that has a mass (the PMC unit).

    Repeats of a token without a blank between them are one residue.

    Args:
        scores: [T, 20] log-probabilities of the tokens at each slot.
        nominal: the nominal mass.
    """
    masses = [round(mass) for mass in MASSES]
    best = scores.new_full((len(masses), nominal + 1), -torch.inf)  # by last token, and mass so far
    best[0, 0] = 0.0
    token = torch.arange(len(masses), device=scores.device)[:, None]
    before = (
        torch.arange(nominal + 1, device=scores.device) - torch.tensor(masses, device=scores.device)[:, None]
    )
    trace = []
    for each in scores:
        two = best.topk(2, 0)
        is_same = two.indices[0] == token
        other = torch.where(is_same, two.values[1], two.values[0])  # from another token
        source = torch.where(is_same, two.indices[1], two.indices[0])
        moved = other.gather(1, before.clamp_min(0)).where(before >= 0, -torch.inf)
        trace.append((moved > best, source))
        best = torch.maximum(moved, best) + each[:, None]
    path, now, at = list[int](), int(best[:, nominal].argmax()), nominal
    for is_new, source in reversed(trace):
        if is_new[now, at]:
            path += [now] * (now > 0)
            at -= masses[now]
            now = int(source[now, at])
    return path[::-1]
