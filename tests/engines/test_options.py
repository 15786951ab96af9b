"""Ranges of the engines' settings."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import InputError
from paceline.engines.options import ModelOptions, check_range


@pytest.mark.parametrize("value", [None, 1, 5])
def test_what_is_in_range_passes(value: int | None) -> None:
    check_range("threads", value, 1, 5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "threads",
            6,
            "`threads` (`DraftOptions.threads` of a draft model) is 6, but must be from 1 to 5; "
            "choose a value in between",
        ),
        ("max_rows", 0, "max_rows is 0, but must be from 1 to 5; choose a value in between"),
        (
            "context_length",
            0,
            "`context_length` (`DraftOptions.context_length` of a draft model) is 0, but must be from 1 to 5; "
            "give a number of tokens, or "
            "None for as much of the model's own as fits (0 on the command line for all of it)",
        ),
    ],
)
def test_what_is_not_is_refused_by_the_names_it_has(name: str, value: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_range(name, value, 1, 5)
    assert str(caught.value) == message


@pytest.mark.parametrize("settings", [{"context_length": 0}, {"threads": 0}, {"threads": 2**40}, {"gpu_layers": -2}])
def test_options_say_which_of_them_is_out_of_range(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(InputError, match=rf"`{name}`.* is {settings[name]}, but must be from") as caught:
        ModelOptions("m", **settings)
    assert caught.value.field == name


def test_fused_attention_is_no_word_of_the_command_line() -> None:
    with pytest.raises(InputError, match="flash_attention is 'off': give True, False, or None"):
        ModelOptions("model.gguf", flash_attention="off")  # type: ignore[arg-type]
