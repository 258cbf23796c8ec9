"""Every command explains itself, with an example."""

import re
import shlex
from pathlib import Path

import pytest

from mmspec.call_fields import CALL_FIELDS
from tests.packaging.source_tree import ROOT

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
            assert part in result.stdout or (command, part) == ("chat", "--json"), (command, part)


def test_help_fits_into_80_columns_and_cuts_no_name(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "distribution; exit with 1 if it does not.\n" in run("--help").stdout, "sentences are whole"
    for name, command in commands_with_models().items():
        said = run(*name.split(), "--help").stdout
        words, examples = said.split(), {f"  {example}" for example in examples_of(command)}
        assert [line for line in said.splitlines() if len(line) > 80 and line not in examples] == [], name
        assert {one for one in examples if one not in said.splitlines()} == set(), name
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert {*parameter.opts, *parameter.secondary_opts} <= set(words), (name, parameter.name)
        assert "…" not in said and "<bool>" not in said, name


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("caption --model x", "the model is the first argument: mmspec caption MODEL"),
        ("serve --model x", "the model is the first argument: mmspec serve MODEL"),
        ("demo generate --model x", "the model is the first argument: mmspec demo generate MODEL"),
        ("train drafter --model x", "--target"),
        ("generate --n 4", "--num-images-per-prompt"),
        ("evaluate images --n 4", "--samples"),
        ("bench x --accelerators copy", "--accelerator"),
        ("bench x --num-prompts 3", "--samples"),
        ("generate --guidance 3", "--guidance-scale"),
        ("generate --steps 3", "--num-inference-steps"),
        ("generate --compare none,sjd", "--accelerator"),
        ("check x --max-tokens 3", "--max-new-tokens"),
        ("check x --temprature 3", "--temperature"),
    ],
)
def test_the_error_for_an_unknown_option_names_the_one_that_was_meant(run, command, named):
    result = run(*command.split())
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split()).replace("root ", "mmspec ")
    assert "No such option" in said and named in said


def commands_with_models():
    from typer.main import get_command

    from mmspec.cli.application import app

    def leaves(command, words):
        for name, child in getattr(command, "commands", {}).items():
            yield from leaves(child, (*words, name))
        if not hasattr(command, "commands"):
            yield " ".join(words), command

    return dict(leaves(get_command(app), ()))


def test_commands_take_the_model_first_and_spell_an_option_in_one_way():
    without = {"accelerators", "bench compare", "convert", "export", "scenes"}
    without |= {"train drafter", "train draft-model"}  # --target
    for name, command in commands_with_models().items():
        names = [one.name for one in command.params if one.param_type_name == "argument"]
        assert name in without or names[0] in ("model", "models"), name
    spelt = {}
    for command in commands_with_models().values():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                written = f"--{parameter.name.replace('_', '-')}"
                assert parameter.name not in CALL_FIELDS or parameter.opts == [written], command.name
                spelt.setdefault(parameter.name, set()).update(parameter.opts)
    assert {name: opts for name, opts in spelt.items() if len(opts) > 1} == {}


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


def commands_of_pages():
    """The lines of Bash in README and docs that run mmspec, with their continuations joined."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if "notes" in page.parts:
            continue
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith("mmspec "):
                    yield line.strip()


def check_example(example):
    from typer.main import get_command

    from mmspec.cli.application import app

    command, words = get_command(app), shlex.split(re.split(r" [>|&] ?", example)[0], comments=True)[1:]
    while hasattr(command, "commands"):
        if words and words[0].startswith("-"):
            return
        named = words[0] in command.commands
        command = command.commands[words[0] if named else next(iter(command.commands))]
        words = words[named:]
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known.add("--help")
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert options <= known, example
    for word in words:
        assert not word.startswith("assets/") or Path(word).exists(), example


def test_examples_name_commands_options_and_files_that_there_are():
    from typer.main import get_command

    from mmspec.cli.application import app

    examples = list(examples_of(get_command(app)))
    assert len(examples) > 40
    for example in examples:
        check_example(example)


WRITTEN = {"--out", "--plot", "--html", "--results"}
FILES = {".png", ".jpg", ".txt", ".csv", ".tsv", ".json", ".jsonl", ".pt", ".pth", ".ckpt", ".safetensors"}


def test_input_files_of_examples_are_in_a_clone_or_placeholders():
    """So that an example runs as it is, or shows which part to replace."""
    from typer.main import get_command

    from mmspec.cli.application import app

    assert app.info.epilog.startswith("Try, in a clone: mmspec ")
    check_example(app.info.epilog.partition(": ")[2])
    for example in [*examples_of(get_command(app)), app.info.epilog]:
        words = shlex.split(example)
        for before, word in zip(["", *words], words, strict=False):
            read = before not in WRITTEN and before != ">" and "compare" not in words
            if read and Path(word).suffix in FILES and not word.startswith("path/to/"):
                assert Path(word).exists(), example


def test_commands_of_pages_name_commands_options_and_files_that_there_are():
    examples = list(commands_of_pages())
    assert len(examples) > 80
    for example in examples:
        check_example(example)
