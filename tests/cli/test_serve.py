"""`mmspec serve` and `mmspec demo` at work: what they say, and how Ctrl-C ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from tests.packaging.source_tree import ROOT


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def test_a_real_process_serves_from_another_folder_and_ends_with_ctrl_c(tiny_folder, tmp_path):
    command = [sys.executable, "-m", "mmspec", "serve", str(tiny_folder), "--port", "0", "--json"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs of a shell may ignore it
    ) as server:
        assert server.stdout is not None
        said = ""
        while not said.endswith("}\n"):
            line = server.stdout.readline()
            assert line, server.communicate()[1]
            said += line
        where = json.loads(said)
        assert fetch(where["url"] + "/health")["models"] == where["models"] == [tiny_folder.name]
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 130
    assert "Traceback" not in errors
    assert "stopped" in errors


def test_a_demo_serves_until_it_is_interrupted(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmspec.cli import demo

    launch, urls, configs = demo.launch, [], []

    def remembered(*arguments: Any, **options: Any) -> str:
        urls.append(launch(*arguments, **options))
        return urls[0]

    class Visited:
        def wait(self) -> None:
            configs.append(fetch(urls[0] + "/config"))
            raise KeyboardInterrupt  # a signal would come when it likes, in the midst of pytest's own work

    monkeypatch.setattr(demo, "launch", remembered)
    monkeypatch.setattr(demo, "threading", SimpleNamespace(Event=Visited))
    result = run("demo", "caption", "--accelerator", "copy", "--port", 0, "--json")
    assert result.exit_code == 130 and "stopped" in result.stderr
    assert json.loads(result.stdout)["model"] == "assets/scenes-llava"
    assert configs[0]["analytics_enabled"] is False
