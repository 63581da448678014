"""The plain way in: CUDAPluggableAllocator with the two C functions, no lowtide.install()."""

import pytest
from lowtide_testing import run_script

pytestmark = pytest.mark.cuda


def test_regions_through_the_plain_plugin():
    run_script("plugin_route.py", timeout=120)
