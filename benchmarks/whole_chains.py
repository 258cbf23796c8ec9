"""Tokens a forward of chains that are judged token by token, and as a whole, of the same drafts.

Both are expectations over what either rule draws, from p and q of every round; the chains are those of a run
with the latter (`acceptance=block`).

    python -m benchmarks.whole_chains assets/scenes-llamagen --task generate --samples 12 \
        --accelerator eagle:drafter=assets/scenes-llamagen-eagle:tree=1x1x1x1
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import rich
import torch
import typer
from rich.progress import track
from torch import Tensor

from mmspec.cli.choice import parse_choice
from mmspec.cli.options import ModelOptions, unpack_options
from mmspec.cli.subject import Question, load_subject
from mmspec.evaluation.tables import figures
from mmspec.methods.block.rule import BlockVerification, weigh_prefixes
from mmspec.trees.verification import sampled_distribution


class Compared(BlockVerification):
    """Block verification that notes what both rules accept of each chain on average, [2] for every round."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def verify(self, draft: Any, scores: Any, *rest: Any) -> Any:
        if draft.max_depth:
            x = draft.tokens[:, 1:, None]
            p = scores.p[:, :-1].gather(-1, x)[..., 0]
            q = sampled_distribution(draft).p.gather(-1, x)[..., 0]
            drawn = (draft.valid[:, 1:] & (q > 0)).long().cumprod(-1).bool()
            p, q = p.where(drawn, 1.0), q.where(drawn, 1.0)
            kept = (p / q).clamp_max(1).cumprod(-1), weigh_prefixes(p, q)[:, 1:]
            self.seen.append(torch.stack([(each * drawn).sum(-1).double() for each in kept], -1))
        return super().verify(draft, scores, *rest)


@unpack_options
def main(
    accelerator: Annotated[str, typer.Option(help="Chains that are sampled: name[:option=value].")],
    *,
    asked: Question,
    how: ModelOptions,
) -> None:
    """Decode prompts one by one, at temperature 1 by default, and print both means."""
    subject = load_subject(asked.source, asked, how, {"task": "describe", "temperature": 1.0})
    choice = parse_choice(accelerator)
    options = {**choice.options, "sampling": "sampled", "acceptance": "block", "length": "fixed"}
    one, rule = subject.contender(replace(choice, options=options)), Compared()
    one = replace(one, accelerator=replace(one.accelerator, rule=rule))
    decode = one.decoder(how.seed, **subject.settings)
    for example in track(subject.examples, "decoding"):
        decode([example])
    seen = torch.cat(rule.seen)
    gain = seen[:, 1] - seen[:, 0]
    alone, whole = (1 + seen.mean(0)).tolist()
    error = 1.96 * float(gain.std()) / len(gain) ** 0.5
    columns = ("drafts", "rounds", "token by token", "as a whole", "gain, 95 % over rounds")
    row = (choice.label, f"{len(seen):,}", f"{alone:.3f}", f"{whole:.3f}")
    rich.print(figures(columns, [(*row, f"{(whole / alone - 1):.2%} ± {error / alone:.2%}")]))


if __name__ == "__main__":
    typer.run(main)
