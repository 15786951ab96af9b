"""Where Ray is."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_folder(request: pytest.FixtureRequest) -> Path:
    """Return the environment that has Ray and paceline."""
    return Path(str(request.config.getoption("--ray"))).absolute()
