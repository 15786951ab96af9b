"""Where the gateway is."""

from __future__ import annotations

import pytest


@pytest.fixture
def gateway_program(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--gateway"))
