"""Output of the commands: progress without a terminal, and the note before slow imports."""

import subprocess
import sys

from mmspec.cli import console

COMMANDS = [
    *("caption x a.png", "chat x hello", "generate x red", "check x", "bench x", "tune x"),
    *("evaluate text x", "evaluate images x", "serve x --port 0", "demo caption x"),
    *("demo generate x", "train drafter --target x", "export x --out out --to transformers"),
]
#: Runs each command without torch and transformers, and prints the first line of its stderr.
PROGRAM = """
import sys, importlib.util
sys.modules["torch"] = sys.modules["transformers"] = None
from typer.testing import CliRunner
import mmspec.cli.demo, mmspec.cli.serve
mmspec.cli.demo.check_installed = mmspec.cli.serve.check_installed = lambda *_: None
from mmspec.cli.application import app
for command in sys.argv[1:]:
    result = CliRunner().invoke(app, command.split())
    assert isinstance(result.exception, ImportError), (command, result.exception)
    print(result.stderr.splitlines()[0])
"""


def test_commands_name_the_model_before_torch_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *COMMANDS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["loading x"] * len(COMMANDS)


def test_progress_without_a_terminal_is_lines(capsys, monkeypatch):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0)
    with console.progress() as bar:
        work = bar.add_task("counting", total=3)
        for name in ("one", "two"):
            bar.update(work, advance=1, description=name)
        bar.advance(work)
    assert capsys.readouterr().err.splitlines() == ["one: 1 of 3", "two: 2 of 3", "two: 3 of 3"]
    with console.progress(quiet=True) as bar:
        bar.update(bar.add_task("counting"), advance=1)
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 10)
    with console.progress() as bar:
        bar.update(bar.add_task("counting"), advance=1)
    assert capsys.readouterr().err == ""
