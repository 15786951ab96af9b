"""What models say about sampling: read from both formats, and never in the way of running them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from paceline.core.errors import ModelWarning
from paceline.core.params import LLAMA_CPP_ORDER, TRANSFORMERS_ORDER
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from tests.models.helpers import edited_gguf, finish, split_gguf, write_folder, write_gguf

Add = Callable[[gguf.GGUFWriter], object]


def gguf_with(path: Path, *add: Add) -> Path:
    """Write the header of a GGUF file, by the methods of the package that name keys and types."""
    writer = gguf.GGUFWriter(path, "llama")
    for add_one in add:
        add_one(writer)
    return finish(writer, path)


def folder_with(path: Path, **said: Any) -> Path:
    write_folder(path)
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


def silently(path: Path) -> SamplingDefaults:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_sampling_defaults(path)


def warned(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the values, and the warnings."""
    with pytest.warns(ModelWarning) as caught:
        values = dict(read_sampling_defaults(path).values)
    return values, [str(warning.message) for warning in caught]


def test_all_that_gguf_metadata_has(tmp_path: Path) -> None:
    path = gguf_with(
        tmp_path / "model.gguf",
        lambda writer: writer.add_sampling_temp(0.6),
        lambda writer: writer.add_sampling_top_k(20),
        lambda writer: writer.add_sampling_top_p(0.9),
        lambda writer: writer.add_sampling_min_p(0.0),
        lambda writer: writer.add_sampling_penalty_repeat(1.05),
        lambda writer: writer.add_sampling_penalty_last_n(-1),
        lambda writer: writer.add_sampling_sequence("penalties;temp;top-k;nucleus;Min_P"),
        # Neutral.
        lambda writer: writer.add_sampling_mirostat(0),
        lambda writer: writer.add_sampling_mirostat_tau(5.0),
        lambda writer: writer.add_sampling_xtc_probability(0.0),
    )
    # The numbers are those that were written, not their nearest in 32 bits: a seed's text is that of --temp 0.6.
    assert silently(path) == SamplingDefaults(
        {
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.0,
            "repeat_penalty": 1.05,
            "penalty_last_n": -1,
            "xtc_probability": 0.0,
            "order": TRANSFORMERS_ORDER,
        },
        "GGUF metadata",
    )


def test_a_split_model_says_it_in_its_first_part(tmp_path: Path) -> None:
    path = edited_gguf(tmp_path / "model.gguf", {"general.sampling.temp": 0.25})
    assert silently(split_gguf(path, tmp_path)[0]).values == {"temperature": 0.25}


def test_all_that_a_folder_has(tmp_path: Path) -> None:
    path = folder_with(
        tmp_path / "model",
        do_sample=True,
        temperature=1,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        eos_token_id=[1, 2],
        max_new_tokens=2048,
        typical_p=1.0,
        num_beams=1,
        suppress_tokens=[],
        transformers_version="4.51.0",
    )
    assert silently(path) == SamplingDefaults(
        {
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.01,
            "typical_p": 1.0,
            "repeat_penalty": 1.1,
            "penalty_last_n": -1,
        },
        "generation_config.json",
    )


@pytest.mark.parametrize(
    ("said", "values"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0, "top_p": 0.8}),
        ({"do_sample": True}, {}),
        ({"do_sample": None, "temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": None, "top_k": -1}, {"top_k": 0}),
        # It changes nothing, so there is nothing to look at.
        ({"repetition_penalty": 1.0}, {"repeat_penalty": 1.0}),
    ],
)
def test_what_is_said_counts_and_what_is_not_said_does_not(
    said: dict[str, Any], values: dict[str, Any], tmp_path: Path
) -> None:
    assert silently(folder_with(tmp_path / "model", **said)).values == values


def test_models_that_say_nothing(tmp_path: Path) -> None:
    for path in (
        embedded_target(),
        embedded_draft(),
        write_gguf(tmp_path / "model.gguf"),
        write_folder(tmp_path / "bare"),
        folder_with(tmp_path / "model", eos_token_id=2),
    ):
        assert silently(path) is NO_DEFAULTS
    assert SamplingDefaults({}, "") == NO_DEFAULTS


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", -0.5, "temperature -0.5 is out of range: give a value from 0.0 to 100.0"),
        ("temperature", "hot", "temperature is 'hot', which is not a number"),
        ("top_k", 2.5, "top-k is 2.5, which is not a whole number"),
        ("top_k", -2, "top-k -2 is out of range"),
        ("top_p", 0, "top-p 0.0 is out of range: give a value above 0.0 to 1.0"),
        ("top_p", float("nan"), "top-p nan is out of range"),
        ("min_p", True, "min-p is True, which is not a number"),
        ("min_p", [0.1], "min-p is .0.1., which is not a number"),
        ("repetition_penalty", 0.0, "repeat penalty 0.0 is out of range"),
    ],
)
def test_a_value_that_cannot_be_used_is_told_and_the_others_are_used(
    key: str, value: Any, words: str, tmp_path: Path
) -> None:
    path = folder_with(tmp_path / "model", **{"temperature": 0.5, "top_k": 7, key: value})
    expected = {"temperature": 0.5, "top_k": 7}
    expected.pop(key, None)
    with pytest.warns(ModelWarning, match=rf"generation_config.json has {key} .*, which is ignored: {words}"):
        assert read_sampling_defaults(path).values == expected


def test_so_it_is_with_gguf_metadata(tmp_path: Path) -> None:
    path = gguf_with(
        tmp_path / "model.gguf",
        lambda writer: writer.add_string("general.sampling.temp", "0.6"),
        lambda writer: writer.add_sampling_top_p(1.5),
        lambda writer: writer.add_sampling_penalty_last_n(-2),
        lambda writer: writer.add_sampling_top_k(7),
    )
    values, messages = warned(path)
    assert values == {"top_k": 7}
    assert [message.split(", which is ignored: ")[0] for message in messages] == [
        f"{path} has general.sampling.temp '0.6'",
        f"{path} has general.sampling.top_p 1.5",
        f"{path} has general.sampling.penalty_last_n -2",
    ]


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_a_damaged_file_is_told_in_one_line(content: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "model")
    (path / "generation_config.json").write_text(content)
    values, (message,) = warned(path)
    assert values == {}
    assert message.startswith("the model's own defaults for sampling are ignored: ")
    assert str(path / "generation_config.json") in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("sequence", "values"),
    [
        ("penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature", {"order": LLAMA_CPP_ORDER}),
        (
            "temperature;penalties;topk;top-p;minp",
            # Those that are left out stand behind what is usually before them.
            {
                "order": (
                    *("logit_bias", "temperature", "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p"),
                    *("min_p", "xtc"),
                )
            },
        ),
        # They are off where nobody sets them.
        ("top_k;temperature", {"order": LLAMA_CPP_ORDER, "top_p": 1.0, "min_p": 0.0}),
        ("penalties;top_k;adaptive_p;top_p;min_p;temperature;infill", {"order": (*LLAMA_CPP_ORDER, "infill")}),
        ("penalties;top_k;top_k;top_p;min_p;temperature", "top_k is named twice"),
        ("greedy", "unknown sampling step 'greedy'"),
    ],
)
def test_the_order_of_samplers(sequence: str, values: dict[str, object] | str, tmp_path: Path) -> None:
    path = gguf_with(tmp_path / "model.gguf", lambda writer: writer.add_sampling_sequence(sequence))
    if not isinstance(values, str):
        assert silently(path).values == values
    else:
        found, (message,) = warned(path)
        assert found == {}
        assert f"general.sampling.sequence {sequence!r}, which is ignored: " in message
        assert values in message


def test_what_paceline_does_not_have_is_told_in_one_line(tmp_path: Path) -> None:
    path = gguf_with(
        tmp_path / "model.gguf",
        lambda writer: writer.add_sampling_mirostat(2),
        lambda writer: writer.add_sampling_xtc_probability(0.5),
        lambda writer: writer.add_sampling_xtc_threshold(0.2),
        lambda writer: writer.add_sampling_temp(0.6),
    )
    values, messages = warned(path)
    assert values == {"temperature": 0.6, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    assert messages == [f"{path} asks for mirostat 2, which paceline does not have; answers are sampled without"]
    folder = folder_with(tmp_path / "model", typical_p=0.9, num_beams=4, no_repeat_ngram_size=0, top_k=3)
    values, messages = warned(folder)
    assert values == {"top_k": 3, "typical_p": 0.9}
    assert len(messages) == 1
    assert "asks for num_beams 4, which" in messages[0]


def test_defaults_stand_for_what_a_call_leaves_open() -> None:
    defaults = SamplingDefaults({"temperature": 0.5, "top_k": 7, "top_p": 0.9}, "somewhere")
    assert defaults.left_open({}) == defaults.values
    assert defaults.left_open({"temperature": 0.0, "top_k": None, "seed": 3}) == {"top_k": 7, "top_p": 0.9}
