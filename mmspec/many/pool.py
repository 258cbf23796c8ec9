"""Pool of Ray Data workers: one pipeline for each GPU, or for each share of the CPU cores."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mmspec.atomic_file import atomic_file
from mmspec.core.statistics import merge_stats
from mmspec.errors import InputError, MissingDependencyError, how_to_install
from mmspec.evaluation.contenders import converse
from mmspec.evaluation.examples import Example
from mmspec.many.work import Item, Work, finished, open_folder, result_file
from mmspec.open_types import Json
from mmspec.pipelines import ImageGenerationPipeline, VisionLanguagePipeline

__all__ = [
    "PipelineWorker",
    "check_ray",
    "run_many",
]


class PipelineWorker:
    """Ray actor that loads a pipeline once and then decodes batches.

    Every item is a separate call, so that the results do not depend on Ray's batches.

    Args:
        work: model, accelerator and settings.
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
        """Decode the items of a batch, write a result for each, and return their indices."""
        items = [Item(**json.loads(str(text))) for text in batch["item"]]
        for item in items:
            self.decode(item)
        return {"index": [item.index for item in items]}

    def decode(self, item: Item) -> None:
        """Decode one item; the record is written last."""
        seed = self.work.seed + item.index
        record: Json = {"index": item.index, "prompt": item.prompt, "seed": seed}
        if self.work.draws:
            what = {"prompt": item.prompt} if item.label is None else {"class_labels": [item.label]}
            output = self.pipe(**what, seed=[seed], output_type="pil", **self.work.settings)
            stats = output.stats
            name = f"{item.index:05}.png"
            with atomic_file(Path(self.work.folder) / name) as temporary:
                output.images[0].save(temporary, "PNG")
            record["file"] = name
            if not self.pipe.target.vector_size:
                layout = self.pipe.target.layout_of(self.pipe.target.grid)
                record["codes"] = layout.codes(output.tokens[0])
        else:
            turns = (item.prompt or "", *item.later)
            example = Example(turns, tuple(item.images))
            outputs = list(converse(self.pipe, example, seed=seed, **self.work.settings))
            stats = merge_stats([output.stats for output in outputs])
            said = [{"text": output.text[0], "finish_reason": output.finish_reasons[0]} for output in outputs]
            record |= {"images": list(item.images), **said[-1]}
            if item.later:  # `text` is the last answer
                asked = ({"prompt": turn} for turn in turns)
                record["turns"] = [one | answer for one, answer in zip(asked, said, strict=True)]
        record |= {"accelerator": stats.accelerator, "promise": stats.exactness}
        record |= {"new_tokens": sum(stats.new_tokens), "target_forwards": stats.target_forwards}
        record |= {"seconds": stats.seconds, "worker": f"{socket.gethostname()}:{os.getpid()}"}
        with atomic_file(result_file(self.work.folder, item.index)) as temporary:
            temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")


def check_ray() -> None:
    """Raise MissingDependencyError unless Ray Data is installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        raise MissingDependencyError(f"--ray needs Ray Data: {how_to_install('ray')}")


def run_many(
    work: Work,
    items: Sequence[Item],
    workers: int | None = None,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Json]:
    """Decode all items without a result; if a worker dies, another one decodes its items.

    Args:
        work: model, accelerator and settings.
        items: all items, including finished ones.
        workers: number of workers; None is one for each GPU of the cluster, or one for every two CPU cores
            if there are no GPUs.
        on_done: called with the number of results after each one.

    Returns:
        The records of all items, in order.

    Raises:
        InputError: the folder or the number of workers cannot be used.
        MissingDependencyError: Ray is not installed.
    """
    check_ray()
    left = open_folder(work, items)
    on_done(len(items) - len(left))
    if left:
        with redirect_stdout(sys.stderr):  # Ray prints messages about dead workers
            _with_ray(work, left, workers, lambda done: on_done(len(items) - len(left) + done))
    return finished(work, items)


def _with_ray(work: Work, left: Sequence[Item], workers: int | None, on_done: Callable[[int], None]) -> None:
    """Decode on the connected cluster, on the one that RAY_ADDRESS names, or on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    started_here = not ray.is_initialized()
    if started_here:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        _decode(ray, work, left, workers, on_done)
    finally:
        if started_here:
            ray.shutdown()


def _decode(
    ray: Any, work: Work, items: Sequence[Item], workers: int | None, on_done: Callable[[int], None]
) -> None:
    cluster = ray.cluster_resources()
    gpus, cores = int(cluster.get("GPU", 0)), int(cluster.get("CPU", 1))
    count = workers or gpus or max(1, cores // 2)
    if count > (gpus or cores):
        rule = f"must be at most {gpus or cores}, the {'GPUs' if gpus else 'CPU cores'} of the cluster"
        raise InputError("--workers", count, rule)
    share = max(1, cores // count)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = 0
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = [{"item": json.dumps(asdict(item))} for item in items]
    # Ray Data restarts a dead worker, and passes its item to another one
    data = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        PipelineWorker,
        fn_constructor_args=(replace(work, threads=share),),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(count, len(items))),
        num_cpus=0 if gpus else share,
        num_gpus=1 if gpus else 0,
    )
    for done, _ in enumerate(data.iter_rows(), start=1):
        on_done(done)
