"""Other dims, copies, options per unit and ZeRO-1, on two ranks and on four."""

from __future__ import annotations

import layout_ranks
import pytest
from layout_ranks import LAYOUT, ZERO1


@pytest.fixture(scope="module", params=[2, 4], ids=["2_ranks", "4_ranks"])
def checks(request):
    return layout_ranks.run(request.param)


@pytest.mark.parametrize("check", [*LAYOUT, *ZERO1], ids=lambda check: check.__name__)
def test_on_ranks(checks, check):
    checks.require(check)
