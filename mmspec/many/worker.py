"""A worker: a pipeline that decodes items one batch after another and writes their results."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmspec.atomic_file import atomic_file
from mmspec.many.work import Item, Work, result_file
from mmspec.pipelines import ImageGenerationPipeline, VisionLanguagePipeline

__all__ = ["PipelineWorker"]


class PipelineWorker:
    """Loads a pipeline once, then decodes batches; what `ray.data` runs as an actor.

    Every item is a call of its own, so that results are those of one machine whatever batches Ray makes.

    Args:
        work: what to do.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        torch.set_num_threads(work.threads)
        device = "cuda" if torch.cuda.is_available() else None
        kind: Any = ImageGenerationPipeline if work.draws else VisionLanguagePipeline
        self.pipe: Any = kind.from_pretrained(
            work.model,
            accelerator=work.accelerator,
            dtype=None if work.dtype == "auto" else work.dtype,
            device_map=device,
            **work.options,
        )
        if work.draws:
            self.pipe.set_progress_bar_config(disable=True)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[int]]:
        """Decode the items of a batch, and write a result for each; returns their indices."""
        items = [Item(**json.loads(str(text))) for text in batch["item"]]
        for item in items:
            self.decode(item)
        return {"index": [item.index for item in items]}

    def decode(self, item: Item) -> None:
        """Decode one item; its record is written last."""
        seed = self.work.seed + item.index
        record: dict[str, Any] = {"index": item.index, "prompt": item.prompt, "seed": seed}
        if self.work.draws:
            what = {"prompt": item.prompt} if item.label is None else {"class_labels": [item.label]}
            output = self.pipe(**what, seed=[seed], output_type="pil", **self.work.settings)
            name = f"{item.index:05}.png"
            with atomic_file(Path(self.work.folder) / name) as temporary:
                output.images[0].save(temporary, "PNG")
            record["file"] = name
            if not self.pipe.target.vector_size:
                record["codes"] = self.pipe.target.grid.codes(output.tokens[0])
        else:
            output = self.pipe(item.prompt, images=list(item.images), seed=seed, **self.work.settings)
            record |= {"images": list(item.images), "text": output.text[0]}
            record["finish_reason"] = output.finish_reasons[0]
        stats = output.stats
        record |= {"accelerator": stats.accelerator, "promise": stats.exactness}
        record |= {"new_tokens": sum(stats.new_tokens), "target_forwards": stats.target_forwards}
        record |= {"seconds": stats.seconds, "worker": f"{socket.gethostname()}:{os.getpid()}"}
        with atomic_file(result_file(self.work.folder, item.index)) as temporary:
            temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
