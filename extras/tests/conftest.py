"""Set-up of the tests, which is that of the product's; mmspec-extras has to be installed."""

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

distribution("mmspec-extras")  # without it no method here has a name: stop before every test fails
