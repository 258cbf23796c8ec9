"""`mmspec serve`: its output, and its end by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from mmspec.cli.serve import name_of
from tests.packaging.source_tree import ROOT


def fetch(url: str | urllib.request.Request) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def told_to_stop(*arguments: Any, cwd: Path, by: int = signal.SIGINT) -> Iterator[dict[str, Any]]:
    """Run a command that serves in a separate process, yield its output, and end it with a signal.

    What it wrote to stderr is added to the output as `errors`.
    """
    layers = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-m", "mmspec", *map(str, arguments), "--port", "0", "--json"],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(layers)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shell jobs may ignore it
    ) as server:
        assert server.stdout is not None
        said = ""
        while not said.endswith("}\n"):
            line = server.stdout.readline()
            assert line, server.communicate()[1]
            said += line
        where = json.loads(said)
        try:
            yield where
        except BaseException:
            server.kill()
            raise
        server.send_signal(by)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 128 + by
    assert "Traceback" not in errors
    assert ("stopped" in errors) == (by == signal.SIGINT)
    where["errors"] = errors


def test_a_real_process_serves_from_another_folder_and_ends_with_ctrl_c(tiny_folder, tmp_path):
    with told_to_stop("serve", tiny_folder, cwd=tmp_path) as where:
        assert fetch(where["url"] + "/health")["models"] == where["models"] == [tiny_folder.name]


def test_the_log_in_json_and_the_reports_meanwhile_and_at_the_end(tiny_folder, tmp_path):
    options = "--log-format", "json", "--report-seconds", "1"
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    with told_to_stop("serve", tiny_folder, *options, cwd=tmp_path, by=signal.SIGTERM) as where:
        ask = urllib.request.Request(where["url"] + "/v1/chat/completions", json.dumps(body).encode())
        ask.add_header("Content-Type", "application/json")
        usage = fetch(ask)["usage"]
        time.sleep(1.5)
    lines = where["errors"].splitlines()
    (line,) = [json.loads(one) for one in lines if one.startswith("{")]
    assert (line["model"], line["status"]) == (tiny_folder.name, 200)
    assert line["new_tokens"] == usage["completion_tokens"] > 0
    reports = [one for one in lines if one.startswith(f"{tiny_folder.name}: 1 rows finished")]
    assert len(reports) >= 2 and len(set(reports)) == 1
    assert any(one.startswith(f"  {usage['completion_tokens']} tokens, ") for one in lines)


def test_the_folder_that_a_dot_stands_for_names_a_model(tmp_path):
    within = tmp_path / "own" / "within"
    within.mkdir(parents=True)
    os.symlink(within, tmp_path / "linked")
    for source, name in ((".", "within"), ("..", "own"), ("../within/.", "within")):
        with chdir(within):
            assert name_of(source) == name
    assert [name_of(source) for source in ("org/model", str(tmp_path / "linked"))] == ["model", "linked"]
