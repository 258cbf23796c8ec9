"""The report: what drafts gave, equal to the sums over the answers."""

import pytest

from mmspec.pipelines import MMSpecPipeline
from mmspec.serving.engine import Engine
from mmspec.serving.metrics import Metrics
from mmspec.serving.report import report_of, report_text
from tests.serving.conftest import reference, running

PROMPTS = ["Describe the picture.", "write a long description of the picture."]
