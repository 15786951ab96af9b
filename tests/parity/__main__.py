"""``python -m tests.parity``."""

from __future__ import annotations

from tests.parity import run

if __name__ == "__main__":
    raise SystemExit(run.main())
