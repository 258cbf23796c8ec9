"""`mmspec demo`: refusals before a model is loaded, and the page as the command serves it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from mmspec.cli.application import app
from mmspec.cli.serve import listen
from mmspec.errors import InputError, MissingDependencyError

COMMANDS = ["caption", "generate"]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("mmspec.cli.demo.load_pipeline", load)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_port_in_use_is_refused_before_a_model_is_loaded(command: str) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(InputError, match=f"--port: got '127.0.0.1:{port}'; an address that is free"):
            CliRunner().invoke(app, ["demo", command, "--port", port], catch_exceptions=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_extra_is_named(command: str, hide: Callable[..., None]) -> None:
    hide("gradio")
    with pytest.raises(MissingDependencyError, match=r"pip install 'mmspec\[demo\]'"):
        CliRunner().invoke(app, ["demo", command], catch_exceptions=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_accelerator_is_refused(command: str) -> None:
    with pytest.raises(InputError, match="accelerator"):
        CliRunner().invoke(app, ["demo", command, "--accelerator", "nine"], catch_exceptions=False)


def test_the_command_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "mmspec", "demo", "caption", "--port", "0", "--json"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs of a shell may ignore it
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        said = json.loads("".join(lines))
        assert said["model"] == "assets/scenes-llava"
        with urllib.request.urlopen(said["url"] + "/config", timeout=10) as answer:
            config = json.load(answer)
        assert config["analytics_enabled"] is False
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "stopped" in process.communicate()[1]
    finally:
        process.kill()
