"""CrossNovo (2510.08169): reads the residues of a peptide in its mass spectrum.

An encoder reads the spectrum. A parallel decoder reads all residues in one forward pass (CTC). An
autoregressive decoder reads one after another, and attends to the spectrum and to the parallel decoder's
states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, pad
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.open_types import Keywords
from mmspec_extras.crossnovo.masses import MASSES, PROTON, RESIDUES, WATER, constrained_path, nominal_mass

__all__ = ["CrossNovo", "CrossNovoConfig", "Spectra"]

TOLERANCE = 0.02  # dalton between two peaks a residue apart
WAVES = 0.5, 4000.0  # shortest and longest wavelength of the encoding of a mass, in dalton


@strict
class CrossNovoConfig(PreTrainedConfig):
    """Config of a model.

    Attributes:
        most: largest number L of residues.
        slots: number T of slots of the parallel decoder.
        crosses: whether the autoregressive decoder attends to the parallel one.
        hidden_size, layers, heads: of the encoder and of each decoder.
    """

    model_type = "crossnovo"

    most: int = 10
    slots: int = 24
    crosses: bool = True
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4


class Spectra(NamedTuple):
    """Spectra of B peptides, of at most N peaks each.

    Attributes:
        peaks: [B, N] mass-to-charge ratios of fragments with one charge.
        intensities: [B, N] up to 1; 0 for padding.
        mass: [B] of all residues of the peptides.
    """

    peaks: Tensor
    intensities: Tensor
    mass: Tensor


class Memory(NamedTuple):
    """States that the autoregressive decoder attends to.

    Attributes:
        states: [B, S, d] of the spectrum, then of the parallel decoder if it is read.
        hidden: [B, S] True at padding.
        logits: [B, T, 20] of the parallel decoder.
        mass: [B].
    """

    states: Tensor
    hidden: Tensor
    logits: Tensor
    mass: Tensor


class CrossNovo(PreTrainedModel):
    """The encoder and both decoders. Token 0 is the end, or a blank of the parallel decoder.

    Example:
        >>> model = CrossNovo(CrossNovoConfig(hidden_size=32)).eval()
        >>> peaks = torch.tensor([[88.04, 147.11]])  # b1 of S and y1 of K
        >>> len(model.sequence(Spectra(peaks, torch.ones(1, 2), torch.tensor([215.127])))[0])
        1
    """

    config: CrossNovoConfig
    config_class = CrossNovoConfig
    base_model_prefix = "crossnovo"
    main_input_name = "peaks"

    def __init__(self, config: CrossNovoConfig) -> None:
        super().__init__(config)
        size, heads, layers, tokens = config.hidden_size, config.heads, config.layers, len(MASSES)
        how: Keywords = {"dim_feedforward": 2 * size, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(size, heads, **how), layers, nn.LayerNorm(size), False
        )
        self.parallel, self.causal = (
            nn.TransformerDecoder(nn.TransformerDecoderLayer(size, heads, **how), layers, nn.LayerNorm(size))
            for _ in range(2)
        )
        self.place = nn.Linear(2 * size, size)
        self.neighbours = nn.Linear(2 * len(RESIDUES) + 1, size)
        self.kinds = nn.Embedding(5, size)  # of nodes: start, end, prefix, suffix; and slots as a memory
        self.slots, self.tokens = nn.Embedding(config.slots, size), nn.Embedding(tokens, size)
        self.label, self.next = nn.Linear(size, tokens), nn.Linear(size, tokens)
        self.post_init()

    def place_of(self, before: Tensor, mass: Tensor) -> Tensor:
        """Encode masses [B, n] before a place, and those after it, of peptides of masses [B]; [B, n, d]."""
        both = torch.stack([before, mass[:, None] - before], -1)[..., None]
        low, high = torch.tensor(WAVES, device=before.device).log()
        length = torch.linspace(low, high, self.config.hidden_size // 2, device=before.device).exp()
        turns = both * (2 * torch.pi / length)
        encoded: Tensor = self.place(torch.cat([turns.sin(), turns.cos()], -1).flatten(-2))
        return encoded

    def encode(self, spectra: Spectra) -> tuple[Tensor, Tensor]:
        """Encode the spectra: states [B, 2 N + 2, d], and True at padding [B, 2 N + 2].

        Each peak is two nodes, since a fragment may begin or end the peptide: the mass before its cut is its
        own, or that of the rest. A node knows which residues lead from and to other nodes.
        """
        peaks, strength, mass = spectra
        ends = torch.stack([torch.zeros_like(mass), mass], 1)
        before = torch.cat([ends, peaks - PROTON, mass[:, None] + WATER + PROTON - peaks], 1)
        strength = torch.cat([torch.ones_like(ends), strength, strength], 1)
        is_real = strength > 0
        apart = (before[:, None] - before[:, :, None])[..., None]  # [B, from, to, 1]
        residues = torch.tensor(MASSES[1:], device=mass.device)
        linked = ((apart - residues).abs() < TOLERANCE) & (is_real[:, None] & is_real[:, :, None])[..., None]
        known = torch.cat([linked.any(2), linked.any(1), strength[..., None]], -1)
        kind = torch.tensor([0, 1] + [2] * peaks.shape[1] + [3] * peaks.shape[1], device=mass.device)
        states = self.place_of(before, mass) + self.neighbours(known.float()) + self.kinds(kind)
        return self.encoder(states, src_key_padding_mask=~is_real), ~is_real

    def freeze(self) -> None:
        """Freeze all that the parallel decoder depends on, so that the other one learns alone."""
        self.requires_grad_(False)
        for part in (self.causal, self.tokens, self.next):
            part.requires_grad_(True)

    def read(self, spectra: Spectra, at_once: bool = True) -> Memory:
        """Run the encoder, and the parallel decoder if the other one attends to it, or `at_once`."""
        states, hidden = self.encode(spectra)
        if not (at_once or self.config.crosses):
            return Memory(states, hidden, states.new_empty(0), spectra.mass)
        share = torch.linspace(0, 1, self.config.slots, device=states.device)
        slots = self.slots.weight + self.place_of(spectra.mass[:, None] * share, spectra.mass)
        found = self.parallel(slots, states, memory_key_padding_mask=hidden)
        logits = self.label(found)
        if self.config.crosses:
            states = torch.cat([states, found + self.kinds.weight[-1]], 1)
            hidden = pad(hidden, (0, found.shape[1]))
        return Memory(states, hidden, logits, spectra.mass)

    def next_logits(self, tokens: Tensor, memory: Memory) -> Tensor:
        """Logits [B, n + 1, 20] of the autoregressive decoder before and after each of the tokens [B, n]."""
        before = pad(torch.tensor(MASSES, device=tokens.device)[tokens].cumsum(1), (1, 0))
        inputs = self.tokens(pad(tokens, (1, 0))) + self.place_of(before, memory.mass)
        length = inputs.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        read = self.causal(inputs, memory.states, later, memory_key_padding_mask=memory.hidden)
        logits: Tensor = self.next(read)
        return logits

    def loss(self, spectra: Spectra, tokens: Tensor, weight: float) -> Tensor:
        """Return `weight` times the loss of the parallel decoder, and the rest that of the other one.

        Args:
            spectra: B spectra.
            tokens: [B, L] residues; 0 after the last.
            weight: between 0 and 1.
        """
        memory, count = self.read(spectra, weight > 0), (tokens > 0).sum(1)
        loss = memory.states.new_zeros(())
        if weight > 0:
            slots = torch.full_like(count, self.config.slots)
            scores = memory.logits.log_softmax(-1).transpose(0, 1)
            loss = loss + weight * ctc_loss(scores, tokens, slots, count)
        if weight < 1:
            place = torch.arange(tokens.shape[1] + 1, device=tokens.device)
            goal = pad(tokens, (0, 1)).where(place <= count[:, None], -100)
            loss = loss + (1 - weight) * cross_entropy(
                self.next_logits(tokens, memory).flatten(0, 1), goal.flatten()
            )
        return loss

    @torch.no_grad()
    def sequence_at_once(self, spectra: Spectra, has_mass: bool = True) -> list[list[int]]:
        """Return the residues by the parallel decoder; those of the peptide's mass if `has_mass` (PMC)."""
        scores = self.read(spectra).logits.log_softmax(-1)
        if has_mass:
            masses = map(nominal_mass, spectra.mass.tolist())
            return [constrained_path(row, mass) for row, mass in zip(scores, masses, strict=True)]
        paths = scores.argmax(-1).tolist()
        return [
            [now for old, now in zip([0, *row], row, strict=False) if now not in (0, old)] for row in paths
        ]

    @torch.no_grad()
    def sequence(
        self, spectra: Spectra, drafts: list[list[int]] | None = None
    ) -> tuple[list[list[int]], list[int]]:
        """Return the residues by the autoregressive decoder, greedily, and its forward passes of each row.

        Drafts change the number of forward passes alone: a token stays if it is what the decoder reads after
        the tokens before it.

        Args:
            spectra: B spectra.
            drafts: B drafts of residues.
        """
        memory, most = self.read(spectra, False), self.config.most
        tokens = torch.zeros(len(spectra.mass), most, dtype=torch.long, device=memory.mass.device)
        for row, draft in zip(tokens, drafts or [], strict=False):
            row[: len(draft)] = torch.tensor(draft[:most], dtype=torch.long)
        passes = torch.zeros_like(tokens[:, 0])
        is_open, place = passes == 0, torch.arange(most, device=tokens.device)
        while is_open.any():
            passes += is_open
            likeliest = self.next_logits(tokens, memory).argmax(-1)[:, :-1]
            right = (likeliest == tokens).cumprod(1).sum(1, keepdim=True)
            first = right.clamp_max(most - 1)  # the first wrong token
            tokens = tokens.scatter(1, first, likeliest.gather(1, first))
            has_ended = ((tokens == 0) & (place <= right)).any(1)
            is_open &= ~has_ended & (first[:, 0] < most - 1)
        kept = (tokens * (tokens.cumprod(1) > 0)).tolist()
        return [[token for token in row if token] for row in kept], passes.tolist()
