"""A pool of workers through Ray Data: one for each GPU, or for each share of the CPU cores."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

from mmspec.errors import InputError, MissingDependencyError
from mmspec.many.work import Item, Work, finished, open_folder

__all__ = ["check_ray", "run_many"]


def check_ray() -> None:
    """Raise MissingDependencyError unless Ray Data is installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        raise MissingDependencyError("--ray needs Ray Data: pip install 'mmspec[ray]'")


def run_many(
    work: Work,
    items: Sequence[Item],
    workers: int | None = None,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[dict[str, Any]]:
    """Decode all items that have no result yet; results of a worker that dies are decoded by another.

    Args:
        work: what workers do.
        items: all of them, done ones too.
        workers: how many; None is one for each GPU of the cluster, or for every two CPU cores without.
        on_done: told the number of results whenever one is there.

    Returns:
        The records of all items, in their order.

    Raises:
        InputError: a folder or a number of workers that cannot be used.
        MissingDependencyError: Ray is not installed.
    """
    check_ray()
    left = open_folder(work, items)
    on_done(len(items) - len(left))
    if left:
        with redirect_stdout(sys.stderr):  # Ray tells there of workers that died
            _with_ray(work, left, workers, lambda done: on_done(len(items) - len(left) + done))
    return finished(work, items)


def _with_ray(work: Work, left: Sequence[Item], workers: int | None, on_done: Callable[[int], None]) -> None:
    """Decode on the cluster that is connected, or that RAY_ADDRESS names, or on this machine."""
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
    from mmspec.many.worker import PipelineWorker

    cluster = ray.cluster_resources()
    gpus, cores = int(cluster.get("GPU", 0)), int(cluster.get("CPU", 1))
    count = workers or gpus or max(1, cores // 2)
    if count > (gpus or cores):
        raise InputError(
            "--workers", count, f"at most {gpus or cores}: the cluster's {'GPUs' if gpus else 'cores'}"
        )
    share = max(1, cores // count)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = 0
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = [{"item": json.dumps(asdict(item))} for item in items]
    # Ray Data starts a worker that has died again, and hands its item to another one
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
