"""Set-up of every test run: no network, one thread per process, random order, no GPU tests without a GPU."""

import gc
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

# Set before any test imports the libraries that read them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads do not help tiny models; xdist uses the cores

import pytest

if not os.path.exists("/dev/nvidia0"):
    # Triton reads it where a kernel is defined; torch is not imported yet, which would know of a GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the objects of all imports from garbage collection, which would traverse them repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but every n-th case of a test that is marked `every(n)` as slow."""
    cases = defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        if marker := item.get_closest_marker("every"):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (_, n), found in cases.items():
        for index, item in enumerate(sorted(found, key=lambda item: item.nodeid)):
            if index % n:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seed = config.getoption("randomly_seed", None)
    if seed is not None:  # pytest-randomly prints it in its header alone, which -q leaves out
        terminalreporter.write_line(f"random order: --randomly-seed={seed} runs the tests in this one again")


@pytest.fixture(scope="session", autouse=True)
def chosen_by_cost() -> Generator[Any]:
    """Fix the draft length by default, because measured round times differ from run to run.

    Gives `Accelerator.is_paced` as it is, for tests of it.
    """
    from mmspec.accelerators import Accelerator

    with pytest.MonkeyPatch.context() as patch:
        real = Accelerator.is_paced
        patch.setattr(Accelerator, "is_paced", lambda self, *_: self.length == "cost")
        yield real


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function that hides packages from `find_spec` by name; transformers remembers what it did not find."""
    real = importlib.util.find_spec

    def hidden(*names: str) -> None:
        def find_spec(name: str, *args: Any) -> Any:
            return None if name in names else real(name, *args)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return hidden


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """File of the real language model, SmolLM2-135M; tests without it are skipped."""
    pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    import torch

    from benchmarks.real_language import gguf_file
    from mmspec.errors import MissingDependencyError

    torch.set_num_threads(1)
    try:
        return gguf_file()
    except MissingDependencyError as error:
        pytest.skip(str(error))
