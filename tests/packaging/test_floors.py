"""The layers of the package: a package imports only from layers below its own, and no method from another.

Every import statement counts: inside functions, and under TYPE_CHECKING too, because a type that is needed
from above is an interface in the wrong place. The package's `__init__` may import from every layer, and only
the command line imports from it.
"""

import ast
import re

from tests.packaging.source_tree import Module, imported_names, modules

GROUND = {
    "atomic_file",
    "call_fields",
    "errors",
    "messages",
    "open_types",
    "plugins",
    "registry",
    "text_file",
    "transcripts",
    "transformers_versions",
    "validation",
}
FLOORS = [
    {"kernels"},
    {"core", "media", "scenes"},
    {"trees"},
    {"places", "vectors"},
    {"visual_tokens"},
    {"compressors"},
    {"models"},
    {"targets"},
    {"families"},
    {"heads"},
    {"accelerator"},
    {"methods"},
    {"accelerators"},
    {"assets"},
    {"training", "evaluation"},
    {"pipelines"},
    {"serving", "many", "demo"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
#: Modules of a method's folder that train its head stand where training does.
TRAINS = re.compile(r"methods\.\w+\.(loss|training|distillation)")
MODULES = [module for module in modules() if module.name != "mmspec"]
FRONT_DOOR = next(module for module in modules() if module.name == "mmspec")


def room_of(name: str) -> str | None:
    """The room of a dotted name, or None outside the package."""
    first, _, rest = name.partition(".")
    if first != "mmspec" or not rest:
        return None
    if TRAINS.match(rest):
        return "training"
    own = [room for room in FLOOR_OF if rest == room or rest.startswith(f"{room}.")]
    return max(own, key=len, default=rest.split(".")[0])


def method_of(name: str) -> str | None:
    """The method in whose folder a dotted name is."""
    match = re.match(r"mmspec\.methods\.(\w+)\.", f"{name}.")
    return match[1] if match else None


def violations(module: Module, tree: ast.Module) -> list[str]:
    found = []
    room, method = room_of(module.name), method_of(module.name)
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
            elif method and method_of(name) not in (None, method):
                problem = "is another method"
            elif other == room or method and method_of(name) == method and room == "training":
                continue
            elif other not in FLOOR_OF:
                problem = "is on no floor; import it from the module that defines it"
            elif FLOOR_OF[other] >= FLOOR_OF[room]:
                problem = f"is not on a floor below {room}"
            else:
                continue
            found.append(f"{module.location(node)}: {name} {problem}")
    return found


def test_every_module_is_on_a_floor():
    lost = [module.name for module in MODULES if room_of(module.name) not in {*FLOOR_OF, *GROUND}]
    assert not lost, f"name their floor in docs/explanation/structures.md and in FLOORS above: {lost}"


def test_a_room_imports_only_from_floors_below():
    found = [line for module in MODULES for line in violations(module, module.tree)]
    assert not found, "\n".join(found)


def test_the_front_door_keeps_its_two_lists_the_same():
    # One list is for type checkers, the other for the run time.
    typed = {name for node in ast.walk(FRONT_DOOR.tree) for name in imported_names(FRONT_DOOR, node)}
    import mmspec

    located = {f"{module}.{name}" for name, module in mmspec._LOCATIONS.items()}
    assert located == {name for name in typed if name.startswith("mmspec.")}
    assert {*mmspec._LOCATIONS, "__version__"} == set(mmspec.__all__)


CACHE, COPY = "mmspec.core.cache", "mmspec.methods.copy.drafter"


def test_an_import_from_above_is_seen():
    for name, source, problem in (
        (CACHE, "import mmspec.targets.causal", "not on a floor below"),
        (CACHE, "from ..targets import causal", "not on a floor below"),
        (CACHE, "from mmspec import MMSpecPipeline", "on no floor"),
        (CACHE, "def f():\n    import mmspec", "the package itself"),
        (CACHE, "if TYPE_CHECKING:\n    from mmspec.cli import main", "not on a floor below"),
        ("mmspec.training.loop", "import mmspec.evaluation.speed.timing", "not on a floor below"),
        (COPY, "from mmspec.methods.eagle.drafter import Eagle", "is another method"),
        (COPY, "from ..eagle import head", "is another method"),
        ("mmspec.registry", "from mmspec.core import draft", "above the ground"),
        ("mmspec.cli.train", "from reference.vlm import train_vlm", "not installed"),
    ):
        (found,) = violations(Module(name, FRONT_DOOR.path, False), ast.parse(source))
        assert problem in found
