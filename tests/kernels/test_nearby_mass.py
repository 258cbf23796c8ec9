"""Mass of neighbours: equal to adding by hand, kernels equal to torch, ties at the limit included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.kernels import nearby_mass, nearby_prefix
from mmspec.kernels import nearby_mass as op_module
from mmspec.kernels import nearby_mass_triton as kernels
from tests.acceptance.codes import random_codes
from tests.contracts.toy import dirichlet
from tests.kernels.hopper import SHARED_MEMORY, Kernel, compile_for_hopper
from tests.kernels.planting import plant
