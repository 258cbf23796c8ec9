"""Every command explains itself, with an example."""

import re

import pytest

COMMANDS = [
    ["caption"],
    ["generate"],
    ["check"],
    ["bench"],
    ["accelerators"],
    ["doctor"],
    ["scenes"],
    ["convert"],
    ["export"],
    ["tune"],
    ["serve"],
    ["train", "vlm"],
    ["train", "autoencoder"],
    ["evaluate", "vlm"],
    ["evaluate", "drafters"],
    ["evaluate", "growth"],
    ["evaluate", "images"],
    ["evaluate", "text"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_and_json(run, command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"mmspec {' '.join(command)}" in result.stdout
    assert "--json" in result.stdout


def test_all_commands_are_listed(run):
    result = run("--help")
    for command in COMMANDS:
        assert re.search(rf"\b{command[0]}\b", result.stdout)


def test_version(run):
    from mmspec import __version__

    assert run("--version").stdout == f"mmspec {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["bench", "--samples", "x"], ["bench", "--repeats", "0"], ["describe"], ["caption", "--no"]]
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    assert run(*arguments).exit_code == 2
