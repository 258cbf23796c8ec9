"""Each platform gets its requirements, and every dependency is used."""

import ast

import pytest
from packaging.requirements import Requirement

from mmspec import errors
from mmspec.errors import how_to_install
from mmspec.evaluation.machine import OPTIONAL, REQUIRED
from tests.packaging.source_tree import imported_names, modules, pyproject

PLATFORMS = ("Linux", "Windows", "Darwin")

# where a package is not imported by its own name
MODULE_OF = {
    "fastapi-offline": "fastapi_offline",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "rouge-score": "rouge_score",
    "torch-fidelity": "torch_fidelity",
}
NEVER_IMPORTED = {
    "num2words": "the processor of SmolVLM needs it",
    "python-multipart": "FastAPI reads forms with it",
    "tensorboard": "accelerate writes its files",
    "torchvision": "the image processors of transformers need it",
}


def every_requirement() -> list[Requirement]:
    """The requirements of every installation, then those of the extras."""
    project = pyproject()["project"]
    extras = project["optional-dependencies"].values()
    named = map(Requirement, [*project["dependencies"], *(name for extra in extras for name in extra)])
    return [requirement for requirement in named if requirement.name != "mmspec"]


def installed_on(system: str, python: str) -> set[str]:
    environment = {"platform_system": system, "python_version": python}
    requirements = map(Requirement, pyproject()["project"]["dependencies"])
    return {
        requirement.name
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_triton_is_installed_where_it_has_wheels(python):
    for system in PLATFORMS:
        assert ("triton" in installed_on(system, python)) == (system == "Linux"), system


def test_every_dependency_is_imported_or_needed_by_one_that_is():
    imported = {
        name.split(".")[0]
        for module in modules()
        for node in ast.walk(module.tree)
        for name in imported_names(module, node)
    }
    names = {requirement.name for requirement in every_requirement()}
    idle = {name for name in names if MODULE_OF.get(name, name) not in imported}
    assert idle == set(NEVER_IMPORTED), "no code imports it: remove it from pyproject.toml"


def test_doctor_looks_at_every_dependency():
    always = {Requirement(line).name for line in pyproject()["project"]["dependencies"] if ";" not in line}
    assert set(REQUIRED) == always
    assert set(OPTIONAL) == {requirement.name for requirement in every_requirement()} - always


def test_an_extra_is_installed_in_the_clone_or_from_a_release(monkeypatch, tmp_path):
    extras = pyproject()["project"]["optional-dependencies"]
    for package, (_, extra) in OPTIONAL.items():
        assert extra is None or package in {Requirement(one).name for one in extras[extra]}
    assert how_to_install("serve") == "pip install -e '.[serve]' in the root of the clone"
    monkeypatch.setattr(errors, "CLONE", tmp_path)
    assert how_to_install("serve") == "pip install 'mmspec[serve]'"
    texts = (module.path.read_text(encoding="utf-8") for module in modules())
    assert sum("mmspec[" in text for text in texts) == 0, "how_to_install has the only wording"


def test_all_means_every_extra():
    extras = pyproject()["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == {*extras} - {"all"}
