"""Set-up of the tests, shared with the tests of mmspec; mmspec-extras must be installed."""

from importlib.metadata import distribution

from tests.conftest import (  # noqa: F401
    chosen_by_cost,
    hide,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    pytest_terminal_summary,
)
from tests.kernels.conftest import both, device, launched  # noqa: F401
from tests.reference.conftest import start  # noqa: F401

distribution("mmspec-extras")  # stops the run if the entry points are missing, before every test fails
