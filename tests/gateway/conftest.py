"""Where the gateway is."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def gateway_program(request: pytest.FixtureRequest) -> str:
    # Absolute, as it is started in a folder of its own.
    return str(Path(request.config.getoption("--gateway")).absolute())
