"""The floors of the house: a room imports only from floors below its own, and no plug-in from another.

Every import statement counts: inside functions, and under TYPE_CHECKING too, because a type that is needed
from above is an interface in the wrong place. The package's `__init__` is the front door and sees every
floor; nobody inside may come in through it.
"""

import ast
import re

from tests.packaging.source_tree import Module, imported_names, modules

GROUND = {
    "atomic_file",
    "errors",
    "heads",
    "messages",
    "registry",
    "text_file",
    "transformers_versions",
    "validation",
}
FLOORS = [
    {"kernels"},
    {"decoding", "media", "scenes"},
    {"visual_tokens"},
    {"compressors"},
    {"models"},
    {"targets", "acceptance"},
    {"drafters"},
    {"accelerators"},
    {"assets"},
    {"training", "evaluation"},
    {"pipelines"},
    {"serving", "many", "demo"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PLUG_IN_ROOMS = ("acceptance", "compressors", "drafters")
PLUG_IN_LOCATION = re.compile(rf"(mmspec\.(?:{'|'.join(PLUG_IN_ROOMS)})\.[\w.]+):\w+")

MODULES = [module for module in modules() if module.name != "mmspec"]
FRONT_DOOR = next(module for module in modules() if module.name == "mmspec")


def room_of(name: str) -> str | None:
    """The room of a dotted name, or None outside the package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "mmspec" and len(parts) > 1 else None


def violations(module: Module, tree: ast.Module, plug_ins: set[str]) -> list[str]:
    found = []
    room = room_of(module.name)
    for node in ast.walk(tree):
        for name in imported_names(module, node):
            other = room_of(name)
            if name == "mmspec" and room != "cli":
                problem = "names the package itself, through which every floor can be reached"
            elif name.split(".")[0] == "reference":
                problem = "is not installed with the package"
            elif other is None or other in GROUND or name == "mmspec.__version__":
                continue
            elif room in GROUND:
                problem = "is above the ground"
            elif other == room:
                if not (module.name in plug_ins and is_part_of(name, plug_ins - {module.name})):
                    continue
                problem = "is another plug-in of the same room"
            elif other not in FLOOR_OF:
                problem = "is on no floor; import it from the module that defines it"
            elif FLOOR_OF[other] >= FLOOR_OF[room]:
                problem = f"is not on a floor below {room}"
            else:
                continue
            found.append(f"{module.location(node)}: {name} {problem}")
    return found


def is_part_of(name: str, owners: set[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def registered_plug_ins() -> set[str]:
    """Modules that some registry entry ("module:attribute") names, wherever the registry stands."""
    return {
        match[1]
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (match := PLUG_IN_LOCATION.fullmatch(node.value))
    }


def test_every_module_is_on_a_floor():
    lost = [module.name for module in MODULES if room_of(module.name) not in {*FLOOR_OF, *GROUND}]
    assert not lost, f"name their floor in docs/structures.md and in FLOORS above: {lost}"


def test_a_room_imports_only_from_floors_below():
    plug_ins = registered_plug_ins()
    assert len(plug_ins) > 20
    found = [line for module in MODULES for line in violations(module, module.tree, plug_ins)]
    assert not found, "\n".join(found)


def test_the_front_door_keeps_its_two_lists_the_same():
    # One list is for type checkers, the other for the run time.
    typed = {name for node in ast.walk(FRONT_DOOR.tree) for name in imported_names(FRONT_DOOR, node)}
    import mmspec

    located = {f"{module}.{name}" for name, module in mmspec._LOCATIONS.items()}
    assert located == {name for name in typed if name.startswith("mmspec.")}
    assert {*mmspec._LOCATIONS, "__version__"} == set(mmspec.__all__)


PLUG_INS = {"mmspec.drafters.copy", "mmspec.drafters.eagle"}
CACHE, COPY = "mmspec.decoding.cache", "mmspec.drafters.copy"


def test_an_import_from_above_is_seen():
    for name, source, problem in (
        (CACHE, "import mmspec.targets.causal", "not on a floor below"),
        (CACHE, "from ..drafters import copy", "not on a floor below"),
        (CACHE, "from mmspec import MMSpecPipeline", "on no floor"),
        (CACHE, "def f():\n    import mmspec", "the package itself"),
        (CACHE, "if TYPE_CHECKING:\n    from mmspec.cli import main", "not on a floor below"),
        ("mmspec.training.loop", "import mmspec.evaluation.speed.timing", "not on a floor below"),
        (COPY, "from mmspec.drafters.eagle import Eagle", "another plug-in"),
        (COPY, "from . import eagle", "another plug-in"),
        ("mmspec.registry", "from mmspec.decoding import draft", "above the ground"),
        ("mmspec.cli.train", "from reference.vlm import train_vlm", "not installed"),
    ):
        (found,) = violations(Module(name, FRONT_DOOR.path, False), ast.parse(source), PLUG_INS)
        assert problem in found


def test_an_import_from_below_is_allowed():
    for name, source in (
        (CACHE, "import torch\nfrom transformers import Cache"),
        (CACHE, "from mmspec.kernels import philox_uniform\nfrom . import draft"),
        (COPY, "from mmspec.drafters.suffixes import SuffixIndex\nimport mmspec.errors"),
        ("mmspec.cli", "from mmspec import __version__\nimport mmspec"),
    ):
        found = violations(Module(name, FRONT_DOOR.path, False), ast.parse(source), PLUG_INS)
        assert not found, source
