"""Most tokens a forward that independent drafts of the next cells can reach, on the image reference model.

A drafter that knows the committed tokens alone, and draws each of the next W cells by itself, can do no
better than some product of distributions q_i, whatever it is trained on. k of its candidates are accepted
with probability E[prod_i min(1, q_i(x_i) / p(x_i | x_1 .. x_(i-1)))] over continuations x drawn from the
model, so that these tell what a product gives. Two are tried: the marginals of the model (means of p over
continuations), and the q_i that are best one after another, each given those before it.

Each is made of half of the continuations and judged by the other half; and judged by those that it is made
of, which is too much.

    python -m benchmarks.true_marginals --images 8 --places 4 --rows 64 --cells 16
"""

from __future__ import annotations

from typing import Annotated, Any

import rich
import torch
import typer
from torch import Tensor
from transformers import DynamicCache

from mmspec import MMSpecPipeline
from mmspec.evaluation.examples import held_out_captions
from mmspec.evaluation.tables import figures

MODEL = "assets/scenes-llamagen"


def continuations(pipe: Any, request: Any, tokens: list[int], rows: int, cells: int) -> tuple[Tensor, Tensor]:
    """Draw continuations of an image: tokens [M, W], and the distributions [M, W, V] they were drawn from."""
    model, sampler = pipe.model.model, pipe.target.sampler(**pipe.sampling({}))
    inputs = request.inputs, request.negative_inputs
    prompts = [model.embed(each["input_ids"], each["caption_features"]) for each in inputs]
    known = model.embed_tokens(torch.tensor([tokens], dtype=torch.long))
    vectors = torch.cat([torch.cat([prompt, known], 1) for prompt in prompts])
    first = pipe.model.config.prefix_length - prompts[0].shape[1]
    place, cache = first + torch.arange(vectors.shape[1])[None], DynamicCache()
    states = model(inputs_embeds=vectors, position_ids=place, cache=cache, use_cache=True).last_hidden_state
    cache.batch_repeat_interleave(rows)
    states, place = states[:, -1:].repeat_interleave(rows, 0), place[:, -1:]
    random, drawn, distributions = torch.Generator().manual_seed(len(tokens)), [], []
    for _ in range(cells):
        p = sampler.scores(sampler.guided(pipe.model.lm_head(states))).p[:, 0]
        x = torch.multinomial(p, 1, generator=random)
        drawn.append(x)
        distributions.append(p)
        place = place + 1
        states = model(x.repeat(2, 1), position_ids=place, cache=cache, use_cache=True).last_hidden_state
    return torch.cat(drawn, 1), torch.stack(distributions, 1)


def lengths(x: Tensor, p: Tensor, among: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens a forward with drafts of 1 to W cells, [W], by marginals and by the best product found.

    Args:
        x, p: continuations that judge.
        among: those that the distributions of a draft are made of.
    """
    lengths = []
    for make in (lambda weights, each: each.mean(0), best_for):
        reached, made = torch.ones(len(x)), torch.ones(len(among[0]))
        length, found = torch.tensor(1.0), []
        for cell in range(x.shape[1]):
            q = make(made, among[1][:, cell])
            reached, made = (
                weights
                * (q[drawn[:, cell]] / at[:, cell].gather(1, drawn[:, cell, None])[:, 0]).clamp_max(1.0)
                for weights, (drawn, at) in ((reached, (x, p)), (made, among))
            )
            length = length + reached.mean()
            found.append(length)
        lengths.append(torch.stack(found))
    return lengths[0], lengths[1]


def best_for(weights: Tensor, p: Tensor) -> Tensor:
    """The q [V] of largest sum_m w_m sum_x min(q(x), p_m(x)), for weights [M] and distributions [M, V].

    What a token gains by more mass is the weight of the distributions that have more of it; so all tokens are
    given mass until that falls to one level.
    """
    values, order = p.sort(0)
    above = weights[order].flip(0).cumsum(0).flip(0)  # of the distributions that have at least so much
    low, high = 0.0, float(weights.sum())
    for _ in range(40):
        level = (low + high) / 2
        q = values.masked_fill(above <= level, 0.0).amax(0)
        low, high = (level, high) if q.sum() > 1 else (low, level)
    q = values.masked_fill(above <= high, 0.0).amax(0)
    return q / q.sum().clamp_min(1.0) + (1 - q.sum()).clamp_min(0.0) * p.mean(0)


@torch.inference_mode()
def main(
    images: Annotated[int, typer.Option(min=1, help="Captions.")] = 12,
    places: Annotated[int, typer.Option(min=1, help="Prefixes of each image.")] = 8,
    rows: Annotated[int, typer.Option(min=2, help="Continuations of each.")] = 128,
    cells: Annotated[int, typer.Option(min=1, help="Longest draft.")] = 16,
) -> None:
    """Bound what a drafter of independent cells can reach."""
    torch.set_num_threads(1)
    pipe = MMSpecPipeline.from_pretrained(MODEL)
    pipe.set_progress_bar_config(disable=True)
    held_out, same = list[Tensor](), list[Tensor]()
    for index, caption in enumerate(held_out_captions(images)):
        call, _ = pipe._prepare_request(caption, {"seed": index})
        for _ in call.rounds():
            pass
        tokens = call.canvas.outputs()[0]
        span = (len(tokens) - cells) // places
        for place in range(index % span, span * places, span):
            x, p = continuations(pipe, call.requests[0], tokens[:place], rows, cells)
            one, other = ((x[half::2], p[half::2]) for half in (0, 1))
            held_out.append(torch.stack([*lengths(*one, other)]))
            same.append(torch.stack([*lengths(x, p, (x, p))]))
    # rounds begin at a place as often as drafts there are short: the mean over places is the harmonic one
    (low, best_low), (high, best_high) = (1 / (1 / torch.stack(each)).mean(0) for each in (held_out, same))
    shown = [
        (str(k + 1), *(f"{bound[k]:.2f}" for bound in (low, high, best_low, best_high))) for k in range(cells)
    ]
    columns = ("cells", "marginals,\nheld out", "same", "best product,\nheld out", "same")
    rich.print(figures(columns, shown, words=1))


if __name__ == "__main__":
    typer.run(main)
