"""Forwards that guessed states of an image save, and whether the images stay the same, for several orders.

`lpd:states=S` decides up to S groups of cells in a forward, with the images of one group a forward. They are
of captions of held-out scenes, and each counts its own forwards.

    python -m reference train parallel --out my-parallel
    python -m benchmarks.image_states my-parallel --images 16
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import rich
import torch
import typer
from tqdm.auto import tqdm

from mmspec.evaluation.tables import figures
from mmspec.scenes import IMAGE_TOKENS, caption, sample_scene
from reference.image_scores import FIRST_SEED, load_pipeline


def main(
    model: Path,
    images: Annotated[int, typer.Option(min=1, help="Held-out captions.")] = 16,
    orders: Annotated[str, typer.Option(help="Of `lpd`.")] = "raster,random,proximity",
    steps: Annotated[str, typer.Option(help="Forwards of plain decoding.")] = "256,64,32",
    states: Annotated[str, typer.Option(help="Most groups that a forward decides.")] = "4,8,16",
    guidance: Annotated[str, typer.Option(help="Scales; own is the model's.")] = "own,1",
    temperature: float = 1.0,
    out: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Draw the same images with and without guessed states."""
    torch.set_num_threads(1)
    pipe = load_pipeline(model)
    scenes = [sample_scene(FIRST_SEED + index, profile=IMAGE_TOKENS) for index in range(images)]
    asked = [caption(scene) for scene in scenes]
    rows: list[dict[str, Any]] = []

    def draw(scale: str, **options: Any) -> Any:
        pipe.set_accelerator("lpd", **options)
        how: dict[str, Any] = {} if scale == "own" else {"guidance_scale": float(scale)}
        seeds = [scene.seed for scene in scenes]
        how |= {"batch_size": images, "temperature": temperature, "output_type": "latent"}
        return pipe(asked, seed=seeds, **how)

    settings = product(guidance.split(","), orders.split(","), map(int, steps.split(",")))
    for scale, order, groups in tqdm(list(settings), unit="setting"):
        options = {"order": order, "generation_steps": groups}
        plain = draw(scale, **options)
        for count in map(int, states.split(",")):
            fast = draw(scale, **options, states=count)
            same = sum(map(list.__eq__, plain.tokens, fast.tokens))
            row = {"guidance": scale, "order": order, "plain": plain.stats.nfe_mean, "states": count}
            row |= {"forwards": fast.stats.nfe_mean, "most": fast.stats.nfe_max, "identical": same}
            rows.append(row | {"seconds": fast.stats.seconds / plain.stats.seconds})
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    columns = ("guidance", "order", "plain", "states", "forwards", "at most", "fewer", "identical", "time")
    cells = (
        (
            row["guidance"],
            row["order"],
            f"{row['plain']:.0f}",
            str(row["states"]),
            f"{row['forwards']:.1f}",
            str(row["most"]),
            f"{row['plain'] / row['forwards']:.2f}x",
            f"{row['identical']}/{images}",
            f"{row['seconds']:.2f}x",
        )
        for row in rows
    )
    rich.print(figures(columns, cells, words=2, width=110))


if __name__ == "__main__":
    typer.run(main)
