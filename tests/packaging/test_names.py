"""The code contains names of methods and model families only in their folders, except for defaults."""

import ast
from collections.abc import Iterable, Iterator

from mmspec.plugins import FAMILIES, records
from tests.packaging.source_tree import modules

METHODS = {name for record in records() for name in (record.name, *record.rules)}
TYPES = {kind for family in FAMILIES.values() for kind in (family.name, *family.types)} - METHODS
#: Names that are also other words: nothing, a role, options of configs, of rules and of transformers.
OTHER_WORDS = {"none", "assistant", "factor", "entropy_bound", "end_weight", "sequential"}
#: Allowed names of methods in other modules.
DEFAULTS = {
    "mmspec.cli.bench": {"draft_model"},  # which transformers' assisted generation is compared with
    "mmspec.cli.compared": {"sjd", "gsd", "lantern", "zipar"},  # compared where nothing is named
    "mmspec.cli.demo": {"sjd"},  # of the page, as its help says
    "mmspec.cli.generate": {"sjd"},  # of the command
    "mmspec.cli.loading": {"copy", "draft_model"},  # of commands, and of a drafter that is no head
    "mmspec.cli.serve": {"sjd"},  # of the pipeline, as its help says
    "mmspec.cli.train": {"eagle"},  # of the option, as its help says
    "mmspec.demo.drawing": {"lpd", "maskgit"},  # what the page offers
    "mmspec.demo.image_generation": {"sjd", "gsd", "lantern", "zipar", "shared_noise", "masked", "maskgit"},
    "mmspec.evaluation.recommendation": {"copy", "mtp", "sjd"},  # what `mmspec doctor MODEL` recommends
    "mmspec.pipelines.base": {"copy", "self_speculation", "draft_model"},  # of the constructor; of a drafter
    "mmspec.pipelines.custom_generate": {"copy"},  # of `accelerate`
    "mmspec.pipelines.image_tokens": {"sjd", "draft_model"},  # of the constructor; refused by name
    "mmspec.pipelines.in_place": {"copy"},  # of `enable`
    "mmspec.serving.schemas": {"suffix"},  # a field of completions
    "mmspec.training.drafter": {"eagle"},  # of `train_drafter`
    "mmspec.trees.growth": {"eagle", "medusa"},  # trees that users choose by these names
}


def named(names: Iterable[str], *homes: str) -> Iterator[tuple[str, str, str]]:
    """Module, place and value of the strings that are such names, outside of their homes."""
    for module in modules():
        for node in ast.walk(module.tree) if not module.name.startswith(homes) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                yield module.name, module.location(node), node.value


def test_no_family_is_named_outside_its_folder() -> None:
    assert [found[1:] for found in named(TYPES, "mmspec.families.")] == []


def test_methods_are_named_as_defaults_alone() -> None:
    names, found = METHODS - OTHER_WORDS, dict[str, set[str]]()
    # targets say which methods decode their models
    for module, _, name in named(names, "mmspec.methods.", "mmspec.families."):
        found.setdefault(module, set()).add(name)
    assert found == DEFAULTS
