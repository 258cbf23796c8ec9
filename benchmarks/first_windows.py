"""Tokens a forward of Jacobi windows that begin with a whole image, as a distilled student would draw it.

A student of Distilled Decoding (DD1, 2412.17153) draws an image in a forward or two, and could say what the
places of a window hold before the target has scored them. Nothing has to be trained to know what that gives:

- "another image": the target's own, of the same caption and other noise, the best that any student draws
  from noise of its own.
- "right in 75%": what plain decoding is about to draw with the same noise, but at one place in four the token
  of that other image. A student that shares its teacher's noise may reach it; its forwards are not counted.

    python -m benchmarks.first_windows --images 16
"""

from __future__ import annotations

from typing import Annotated, Any

import rich
import torch
import typer
from rich.progress import track
from torch import Tensor

from mmspec import MMSpecPipeline
from mmspec.accelerators.accelerator import pair
from mmspec.evaluation.examples import held_out_captions
from mmspec.evaluation.tables import figures
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.jacobi_session import JacobiSession
from mmspec.trees.window import look_up

MODEL = "assets/scenes-llamagen"
RIGHT = (0.5, 0.75, 0.9, 0.95)
COUPLINGS = ("maximal", "exact")


class ImageSession(JacobiSession):
    """Windows whose places hold the tokens of an image until the target has scored them."""

    def _standing(self, place: Tensor, *rest: Any) -> Tensor:
        return look_up(self.drafter.image.expand(len(place), -1), place)


class ImageWindows(JacobiDrafter):
    """Drafts the tokens of an image, then as `JacobiDrafter`.

    Args:
        image: its tokens, in raster order.
        coupling: as of `WindowDrafter`.
    """

    session = ImageSession

    def __init__(self, image: Tensor, coupling: str) -> None:
        super().__init__(32, coupling, "repeat")
        self.image = image[None]


@torch.inference_mode()
def main(
    images: Annotated[int, typer.Option(min=1, help="Captions.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Print the means of tokens a forward over images."""
    torch.set_num_threads(threads)
    pipe = MMSpecPipeline.from_pretrained(MODEL, accelerator="none")
    pipe.set_progress_bar_config(disable=True)
    rows: dict[str, list[list[float]]] = {}
    for index, caption in enumerate(track(held_out_captions(images), description="images")):
        pipe.set_accelerator("none")
        own, other = (
            torch.tensor(pipe(caption, seed=seed, output_type="latent").tokens[0])
            for seed in (index, index + images)
        )
        wrong = torch.rand(len(own), generator=torch.Generator().manual_seed(index))
        begun = {"another image": other}
        begun |= {f"right in {share:.0%}": own.where(wrong < share, other) for share in RIGHT}
        for coupling in COUPLINGS:
            drafters = {"edge of the window": JacobiDrafter(32, coupling)}
            drafters |= {name: ImageWindows(image, coupling) for name, image in begun.items()}
            for name, drafter in drafters.items():
                pipe.set_accelerator(pair("sjd", drafter))
                drawn = pipe(caption, seed=index, output_type="latent")
                if coupling == "exact" and drawn.tokens[0] != own.tolist():
                    raise RuntimeError(f"{name}: not the image of plain decoding")
                rows.setdefault(name, [[], []])[COUPLINGS.index(coupling)].append(
                    len(own) / drawn.stats.target_forwards
                )
    shown = [
        (name, *(f"{images / sum(1 / each for each in side):.2f}" for side in sides))
        for name, sides in rows.items()
    ]
    rich.print(figures(("places begin with", *(f"coupling={each}" for each in COUPLINGS)), shown, words=1))


if __name__ == "__main__":
    typer.run(main)
