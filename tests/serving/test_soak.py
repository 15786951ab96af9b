"""A short soak of ``paceline serve`` as a process; ``python -m benchmarks server-soak`` makes thousands of requests."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from benchmarks.server_soak.soaking import GRACE_S, LATE_S, soak


@pytest.mark.long
async def test_two_hundred_clients_that_misbehave_leave_nothing_behind(tmp_path: Path) -> None:
    figures = await soak(200, seed=11, log=tmp_path / "serve.log")
    assert figures["requests"] == 200
    assert figures["exit_status"] == 0
    assert figures["seconds_from_sigterm_to_exit"] <= GRACE_S + LATE_S
    assert figures["growth_bytes"] <= figures["growth_limit_bytes"]
    # Each has 400 rounds left to go.
    assert median(figures["rounds_until_a_cancelled_one_is_gone"]) < 200
    # Most of what clients may do was done.
    assert len(figures["outcomes"]) >= 15
