"""Slow choice among the likeliest tokens of each slot, from a head's weights: DFlash 2 and LiLiCorr."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

from mmspec.methods.dflash.head import DFlashHead

Embed = Callable[[Tensor], Tensor]


def likeliest(logits: Tensor, count: int) -> list[list[int]]:
    """The likeliest tokens of each slot [n, V], the best first."""
    return [sorted(range(len(row)), key=lambda token: -float(row[token]))[:count] for row in logits]


def selected(head: DFlashHead, logits: Tensor, hidden: Tensor, root: int) -> tuple[list[int], Tensor]:
    """The greedy path of DFlash 2 after a token, and the scores [n, k] along it."""
    part, token, path, rows = head.candidate_selector, root, list[int](), []
    assert part is not None
    for slot, words in enumerate(likeliest(logits, head.config.candidates)):
        gate = part.hidden_projection.weight @ hidden[slot]
        context = part.predecessor_codebook[token] * gate
        scores = [logits[slot, word] + (context * part.successor_codebook[word]).sum() for word in words]
        rows.append(torch.stack(scores))
        token = words[int(rows[-1].argmax())]
        path.append(token)
    return path, torch.stack(rows)


def correlated(
    head: DFlashHead, logits: Tensor, hidden: Tensor, anchor: Tensor, embed: Embed
) -> tuple[list[int], Tensor]:
    """The greedy path of LiLiCorr, and the scores [n, k] along it: one candidate at a time."""
    config, weights = head.config, head.state_dict()
    log_p, words = logits.log_softmax(-1), likeliest(logits, config.candidates)
    ranks, eps = len(words[0]), config.rms_norm_eps

    def through(row: Tensor, name: str) -> Tensor:
        made: Tensor = weights[f"lilicorr.{name}.weight"] @ row + weights[f"lilicorr.{name}.bias"]
        return made

    def normed(row: Tensor, name: str) -> Tensor:
        return row * (row.square().mean() + eps).rsqrt() * weights[f"lilicorr.{name}.weight"]

    def unit(row: Tensor) -> Tensor:
        return row / row.norm().clamp_min(config.lattice_eps)

    rows, slots = [], []
    for slot, each in enumerate(words):
        for rank, word in enumerate(each):
            said = log_p[slot, word]
            best = log_p[slot, each[0]]
            first = torch.tensor(float(rank == 0)).to(said)
            share = torch.tensor(rank / max(ranks - 1, 1)).to(said)
            features = torch.stack([said, said.exp(), said - best, share, first])
            scale, shift = (weights[f"lilicorr.feature_mlp.0.{name}"] for name in ("weight", "bias"))
            features = layer_norm(features, (5,), scale, shift)
            row = embed(torch.tensor([[word]]))[0, 0]
            row = through(row, "token_proj") + through(hidden[slot], "pass_hidden_proj")
            row = row + through(silu(through(features, "feature_mlp.1")), "feature_mlp.3")
            row = row + weights["lilicorr.slot_embedding"][0, 0, slot, 0]
            rows.append(row + weights["lilicorr.rank_embedding"][0, 0, 0, rank])
            slots.append(slot)
    size = config.lattice_width // config.lattice_heads
    for index in range(config.lattice_layers):
        name, made = f"layers.{index}", []
        inner = [normed(row, f"{name}.attn_norm") for row in rows]
        both = weights[f"lilicorr.{name}.attn.in_proj_weight"], weights[f"lilicorr.{name}.attn.in_proj_bias"]
        parts = [(both[0] @ row + both[1]).chunk(3) for row in inner]
        for place, (query, _, _) in enumerate(parts):
            heads = []
            for one in range(config.lattice_heads):
                cut = slice(one * size, (one + 1) * size)
                scores = []
                for other, (_, key, _) in enumerate(parts):
                    distance = slots[place] - slots[other]
                    score = (query[cut] * key[cut]).sum() / math.sqrt(size)
                    score = score + weights["lilicorr.relative_slot_bias"][one, distance + config.block - 1]
                    scores.append(score + (distance == 0) * weights["lilicorr.same_slot_bias"][one])
                shares = torch.stack(scores).softmax(0)
                heads.append(sum(share * part[2][cut] for share, part in zip(shares, parts, strict=True)))
            made.append(through(torch.cat(heads), f"{name}.attn.out_proj"))  # type: ignore[arg-type]
        rows = [row + one for row, one in zip(rows, made, strict=True)]
        inner = [silu(through(normed(row, f"{name}.mlp_norm"), f"{name}.mlp.0")) for row in rows]
        rows = [row + through(one, f"{name}.mlp.2") for row, one in zip(rows, inner, strict=True)]
    text = normed(through(anchor, "context_proj"), "anchor_norm")
    leaving, entering = [], []
    for row in rows:
        row = normed(row, "output_norm")
        factor = silu(through(torch.cat([row, text, row * text]), "factor_input_proj"))
        leaving.append(unit(through(factor, "out_head")))
        entering.append(unit(through(factor, "in_head")))
    before, path, found = unit(through(text, "anchor_out_head")), list[int](), []
    for slot, each in enumerate(words):
        places = range(slot * ranks, (slot + 1) * ranks)
        found.append(
            torch.stack([(before * entering[place]).sum() * config.lattice_scale for place in places])
        )
        chosen = int(found[-1].argmax())
        before = leaving[slot * ranks + chosen]
        path.append(each[chosen])
    return path, torch.stack(found)
