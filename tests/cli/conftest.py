"""What tests of commands share."""

from pathlib import Path

import pytest

from tests.chat.conversing import BEGUN, CHATML, FIRST_SYSTEM, THINKING
from tests.cli.invoking import invoke, refused

__all__ = ["invoke", "refused"]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of chat templates, for :func:`~tests.cli.invoking.by_template`."""
    folder = tmp_path_factory.mktemp("templates")
    sources = {"chatml": CHATML, "thinking": THINKING, "begun": BEGUN, "first_system": FIRST_SYSTEM}
    for name, source in sources.items():
        (folder / f"{name}.jinja").write_text(source)
    return folder
