"""`mmspec serve` and `mmspec demo` at work: what they say, and how Ctrl-C ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
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

    launch, configs, main = demo.launch, [], threading.main_thread().ident

    def visited(*arguments: Any, **options: Any) -> str:
        url = launch(*arguments, **options)

        def visit() -> None:
            try:
                configs.append(fetch(url + "/config"))
            finally:
                signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=visit).start()
        return url

    monkeypatch.setattr(demo, "launch", visited)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell may ignore it
    try:
        result = run("demo", "caption", "--accelerator", "copy", "--port", 0, "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130 and "stopped" in result.stderr
    assert json.loads(result.stdout)["model"] == "assets/scenes-llava"
    assert configs[0]["analytics_enabled"] is False
