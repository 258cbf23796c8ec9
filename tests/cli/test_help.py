"""Every command explains itself, with an example."""

import re
import shlex
from pathlib import Path

COMMANDS = [
    "caption",
    "chat",
    "generate",
    "check",
    "bench",
    "accelerators",
    "doctor",
    "scenes",
    "convert",
    "export",
]
COMMANDS += [
    "tune",
    "serve",
    "train drafter",
    "train draft-model",
    "evaluate images",
    "evaluate text",
    "demo caption",
]


def test_every_command_is_listed_and_has_an_example_and_json(run):
    listed = run("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"\b{command.split()[0]}\b", listed), command
        result = run(*command.split(), "--help")
        assert result.exit_code == 0
        for part in ("Example", f"mmspec {command}", "--json"):
            assert part in result.stdout, (command, part)


def test_version(run):
    from mmspec import __version__

    assert run("--version").stdout == f"mmspec {__version__}\n"


def test_wrong_usage_is_exit_code_2(run):
    for arguments in ("bench --samples x", "bench --repeats 0", "describe", "caption --no"):
        assert run(*arguments.split()).exit_code == 2


def examples_of(command):
    for child in getattr(command, "commands", {}).values():
        yield from examples_of(child)
    if not hasattr(command, "commands"):
        lines = (line.strip() for line in (command.help or "").split("Example:")[-1].splitlines())
        yield from (line for line in lines if line.startswith("mmspec "))


def test_examples_name_commands_options_and_files_that_there_are():
    from typer.main import get_command

    from mmspec.cli.application import app

    examples = list(examples_of(get_command(app)))
    assert len(examples) > 40
    for example in examples:
        command, words = get_command(app), shlex.split(example.split(" > ")[0])[1:]
        while hasattr(command, "commands"):
            named = words[0] in command.commands
            command = command.commands[words[0] if named else next(iter(command.commands))]
            words = words[named:]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, example
        for word in words:
            assert not word.startswith("assets/") or Path(word).exists(), word
