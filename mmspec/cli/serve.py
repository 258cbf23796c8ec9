"""`mmspec serve`: an HTTP server with the routes of the OpenAI API."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import note
from mmspec.cli.loading import (
    REFERENCE,
    REFERENCE_IMAGE,
    announce,
    choose,
    device_of,
    load_pipeline,
)
from mmspec.cli.options import AsJson, Host, LoadOptions, Port, unpack_options
from mmspec.errors import InputError, MissingDependencyError, how_to_install

if TYPE_CHECKING:
    from mmspec.serving.engine import Engine
    from mmspec.serving.limits import ServerLimits
    from mmspec.serving.metrics import Metrics

__all__ = ["serve"]

DRAIN_SECONDS = 20
PREFIX_SHARE = 8  # by default the prefix cache of a model may take an eighth of the free memory


class LogFormat(StrEnum):
    """Formats of the log."""

    TEXT = "text"
    JSON = "json"


@unpack_options
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Checkpoint folders or hub ids; by default the reference models for text and images.",
        ),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="none, copy, sjd:window=16, ...; by default for text that of drafters.json in the model's "
            "folder, or copy; for images sjd:coupling=exact, or none where sjd does not apply."
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="LoRA adapter of the one MODEL, a folder or hub id; requests name it as their model. "
            "Repeatable.",
            show_default="none",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send; by default none.", envvar="MMSPEC_API_KEY"),
    ] = None,
    rows: Annotated[
        int,
        typer.Option(
            min=1,
            help="Largest number of requests in the running batch of a model. Each one there takes memory; "
            "further ones wait.",
        ),
    ] = 8,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="On a GPU, capture rounds in CUDA graphs before the first request; not measured yet.",
        ),
    ] = False,
    queue: Annotated[
        int, typer.Option(min=1, help="Largest number of waiting requests; further ones are refused.")
    ] = 64,
    wait_seconds: Annotated[
        float,
        typer.Option(help="Seconds without a request entering the batch after which waiting ones fail."),
    ] = 300,
    run_seconds: Annotated[float, typer.Option(help="Longest decoding time of a request, in seconds.")] = 300,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request body, in bytes.")] = 32_000_000,
    max_images: Annotated[int, typer.Option(min=1, help="Maximum number of images per request.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 4096,
    prefix_cache_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Memory limit of each model's prefix cache, in bytes; 0 for none.",
            show_default="an eighth of the free memory",
        ),
    ] = None,
    prefill_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of prompt tokens that are read between two rounds, so that other requests keep "
            "streaming; 0 to read prompts whole.",
        ),
    ] = 512,
    allow_url_domain: Annotated[
        list[str] | None,
        typer.Option(
            help="Server from which images may be fetched, * for all public servers; repeatable.",
            show_default="none",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may read answers, such as http://localhost:3000, * for all; "
            "repeatable.",
            show_default="none",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="Format of the log on stderr: text or json, one line a request.")
    ] = LogFormat.TEXT,
    report: Annotated[
        bool, typer.Option("--report", help="At the end, report on stderr what the drafts gave.")
    ] = False,
    report_seconds: Annotated[
        float | None,
        typer.Option(
            min=1, help="Seconds between reports; implies --report.", show_default="only at the end"
        ),
    ] = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="Format of tool calls: hermes, qwen3_coder, llama3_json, mistral, mistral_args, "
            "deepseek_v3, deepseek_v31 or none; auto chooses by the chat template."
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="Format of reasoning: qwen3, deepseek_r1, mistral or none; auto chooses by the chat "
            "template."
        ),
    ] = "auto",
    as_json: AsJson = False,
    *,
    how: LoadOptions,
) -> None:
    """Serve models over HTTP, with OpenAI's routes for chat completions and image generations.

    Requests join the running batch between rounds, in order of arrival. Further routes:
    /v1/models, /health and /metrics (Prometheus).

    Example:
        mmspec serve --port 8000
        mmspec serve path/to/model --rows 16 --api-key secret --allow-origin http://localhost:3000
    """
    check_installed(
        "mmspec serve", "serve", "fastapi", "fastapi_offline", "jinja2", "uvicorn", "prometheus_client"
    )
    references = () if models else (REFERENCE, REFERENCE_IMAGE)
    sources = [announce(one) for one in models or ()] + [announce(None, one) for one in references]
    from mmspec.serving.app import create_app, read_origin
    from mmspec.serving.limits import ServerLimits
    from mmspec.serving.metrics import Metrics
    from mmspec.serving.request_log import start_log
    from mmspec.serving.tool_calls import check_parsers

    check_parsers(tool_parser, reasoning_parser)  # before models are loaded
    limits = ServerLimits(
        max_waiting=queue,
        wait_seconds=wait_seconds,
        run_seconds=run_seconds,
        max_body_bytes=max_body_bytes,
        max_images=max_images,
        max_tokens=max_tokens,
        url_hosts=frozenset(allow_url_domain or []),
    )
    origins = [read_origin(origin) for origin in allow_origin or []]
    names = [name_of(source) for source in sources]
    adapters = [read_lora(one) for one in lora or ()]
    if adapters and len(sources) > 1:
        raise InputError("--lora", lora, "needs one MODEL, because an adapter fits one model")
    names += [name for name, _ in adapters]
    if len(set(names)) < len(names):
        raise InputError("MODEL", names, "must have different names, by which clients select a model")
    if how.drafter is not None and len(sources) > 1:
        raise InputError("--drafter", how.drafter, "needs one MODEL, because a drafter fits one model")
    for source in sources:
        choose(accelerator, source, how.drafter)  # raises for an unknown name or a missing drafter
    if compiled:
        check_graphs(how)
    with listen(host, port) as listener:  # before models are loaded, which is slow
        metrics = Metrics()
        what = accelerator, rows, limits, metrics, how, compiled, prefix_cache_bytes, prefill_tokens, adapters
        engines = [load_engine(source, *what) for source in sources]
        application = create_app(engines, metrics, limits, api_key, origins, tool_parser, reasoning_parser)
        start_log(as_json=log_format is LogFormat.JSON)
        models = [engine.name for engine in engines]
        with reporting(metrics, models, report_seconds) if report or report_seconds else nullcontext():
            run_server(application, listener, names, as_json=as_json)


def check_installed(command: str, extra: str, *packages: str) -> None:
    """Raise MissingDependencyError unless the packages of a command are installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(f"{command} needs {package}: {how_to_install(extra)}")


def check_graphs(how: LoadOptions) -> None:
    """Raise InputError if models will be on a device without CUDA graphs."""
    import torch

    from mmspec.core.graphs import has_graphs

    device = device_of(how) or "cpu"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not has_graphs(torch.device(device)):
        raise InputError("--compile", device, "must be off where the model is not on a CUDA device")


def listen(host: str, port: int) -> socket.socket:
    """Open the socket of a server; raises InputError if the address is not free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        rule = f"must be a free address ({error.strerror or error}); choose another --port or --host"
        raise InputError("--port", f"{host}:{port}", rule) from error


def name_of(source: str) -> str:
    """The name of a model: the last part of its absolute path or hub id."""
    return Path(os.path.abspath(source)).name


def load_engine(
    source: str,
    accelerator: str | None,
    rows: int,
    limits: ServerLimits,
    metrics: Metrics,
    how: LoadOptions,
    compiled: bool = False,
    prefix_cache_bytes: int | None = None,
    prefill_tokens: int = 0,
    adapters: Sequence[tuple[str, str]] = (),
) -> Engine:
    """Load a model with its accelerator and LoRA adapters, compiled if asked for, and return its engine."""
    from mmspec.pipelines import ImageGenerationPipeline, MMSpecPipeline
    from mmspec.serving.engine import Engine
    from mmspec.serving.rows import why_in_turn

    pipe = load_pipeline(MMSpecPipeline, source, how)
    load_loras(pipe, adapters)
    if accelerator is None and how.drafter is None and isinstance(pipe, ImageGenerationPipeline):
        accelerator = pipe.default_accelerator
        if accelerator == "sjd":
            # with this coupling no token depends on the window, whose size follows the number of rows
            accelerator = "sjd:coupling=exact"
    choice = choose(accelerator, source, how.drafter, pipe.default_accelerator)
    pipe.set_accelerator(choice.name, **choice.options)
    pipe.media_limits = limits.media
    if compiled:
        pipe.compile(())
    if adapters and pipe.target.steps is not None:
        raise InputError(
            "--lora", dict(adapters), "cannot be combined with CUDA graphs, which hold one adapter"
        )
    remember_prompts(pipe, prefix_cache_bytes)
    if prefill_tokens:
        pipe.enable_chunked_prefill(prefill_tokens)
    name = name_of(source)
    reason = why_in_turn(pipe)
    note(
        f"{name}: {choice.label}, {rows} rows" + ("" if reason is None else f", decoded in turns ({reason})")
    )
    own = [adapter for adapter, _ in adapters]
    return Engine(name, pipe, rows, limits.max_waiting, metrics.of_model(name), own)


def read_lora(option: str) -> tuple[str, str]:
    """Split a value of --lora into the name and the source of an adapter."""
    name, _, source = option.partition("=")
    if not name or not source:
        raise InputError("--lora", option, "must be NAME=PATH")
    return name, source


def load_loras(pipe: Any, adapters: Sequence[tuple[str, str]]) -> None:
    """Load LoRA adapters, names with sources, onto the model of a pipeline; none of them acts yet.

    Raises:
        InputError: the model generates images, or has an adapter of its own.
    """
    from mmspec.models.adapters import load_lora, use_adapter
    from mmspec.pipelines import ImageGenerationPipeline

    if not adapters:
        return
    if isinstance(pipe, ImageGenerationPipeline) or getattr(pipe.model, "_hf_peft_config_loaded", False):
        rule = "needs a model that generates text and has no adapter of its own"
        raise InputError("--lora", dict(adapters), rule)
    for name, source in adapters:
        load_lora(pipe.model, name, source)
    use_adapter(pipe.model, None)


def remember_prompts(pipe: Any, max_bytes: int | None) -> None:
    """Enable the prefix cache of a pipeline for text, unless its model has none.

    Args:
        pipe: the pipeline.
        max_bytes: limit of the cache, 0 for none; None for a share of the free memory.
    """
    from mmspec.models.free_memory import free_bytes
    from mmspec.pipelines import ImageGenerationPipeline

    if max_bytes is None:
        max_bytes = free_bytes(pipe.device) // PREFIX_SHARE
    prompts_are_short = isinstance(pipe, ImageGenerationPipeline)
    if max_bytes and not prompts_are_short and not pipe.target.by_blocks:
        pipe.enable_prefix_cache(max_bytes)


@contextmanager
def reporting(metrics: Metrics, models: Sequence[str], seconds: float | None) -> Iterator[None]:
    """Print the report of a server at the end, and every so many seconds."""
    from mmspec.serving.report import report_text

    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            note(report_text(metrics, models))

    reporter = threading.Thread(target=repeat, name="mmspec report", daemon=True)
    if seconds is not None:
        reporter.start()
    # uvicorn drains, and then sends the signal again, which would end the process before the report
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        ended.set()
        if seconds is not None:
            reporter.join()
        note(report_text(metrics, models))


def run_server(application: Any, listener: socket.socket, names: list[str], *, as_json: bool) -> None:
    """Serve until SIGTERM or Ctrl-C; Ctrl-C finishes running requests and exits with 130."""
    import uvicorn

    from mmspec.cli.console import print_result

    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print_result({"url": url, "models": names}, f"{url} serves {', '.join(names)}", as_json)
    config = uvicorn.Config(
        application,
        access_log=False,  # `Guard` logs requests
        log_config=None,  # uvicorn's warnings have the format of the log
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=DRAIN_SECONDS,
        server_header=False,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        note("stopped")
        raise typer.Exit(130) from None
