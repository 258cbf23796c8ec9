"""What an installation brings, on each platform."""

import pytest
from packaging.requirements import Requirement

from tests.packaging.source_tree import pyproject

PLATFORMS = {  # (platform_system, platform_machine) -> the video reader that has wheels there
    ("Linux", "x86_64"): "decord",
    ("Linux", "aarch64"): "av",
    ("Windows", "AMD64"): "decord",
    ("Windows", "ARM64"): "av",
    ("Darwin", "arm64"): "av",
    ("Darwin", "x86_64"): "av",
}


def installed_on(system: str, machine: str, python: str) -> set[str]:
    environment = {"platform_system": system, "platform_machine": machine, "python_version": python}
    requirements = map(Requirement, pyproject()["project"]["dependencies"])
    return {
        requirement.name
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(("system", "machine"), PLATFORMS)
def test_each_platform_gets_the_one_video_reader_that_has_wheels_for_it(system, machine, python):
    installed = installed_on(system, machine, python)
    assert installed & {"decord", "av"} == {PLATFORMS[system, machine]}
    assert ("triton" in installed) == (system == "Linux")


def test_all_means_every_extra():
    extras = pyproject()["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == {*extras} - {"all"}
