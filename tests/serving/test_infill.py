"""``/infill``: the prompt of a gap, the requests of editors, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("llama_cpp")

import paceline
from paceline.models.embedded import embedded_draft
from paceline.server_options import ServerOptions
from paceline.serving.model_host import ServedModel
from tests.models.helpers import with_last_tokens
from tests.serving.hosted import Hosted, hosted

NAMES: Final = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
FILE_NAMES: Final = ("<|repo_name|>", "<|file_sep|>")
BEFORE: Final = "def add(a, b):\n    total = a + b\n"
BEHIND: Final = "    return total\n"
EXTRA: Final[list[dict[str, Any]]] = [
    {"filename": "sums.py", "text": "def add_all(numbers):\n    return sum(numbers)\n", "time": [1, 2]},
    {"text": "x = 1\n"},
]
GAP: Final[dict[str, Any]] = {"input_prefix": BEFORE, "input_suffix": BEHIND, "temperature": 0, "n_predict": 24}
CONTEXT: Final = 512


def serve(path: Path) -> ServedModel:
    options = paceline.ModelOptions(path, context_length=CONTEXT, max_sequences=2, flash_attention=False, threads=1)
    model = paceline.load(options, policy=paceline.FixedPolicy(4))
    return ServedModel(model, None, ("filler",), policy="fixed")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_last_tokens(tmp_path_factory.mktemp("infill") / "repository.gguf", [*NAMES, *FILE_NAMES])


@pytest.fixture(scope="module")
def filler(path: Path) -> Iterator[Hosted]:
    """A model with tokens for gaps and for the files of a repository."""
    with hosted(lambda: serve(path), ServerOptions(infill_tokens=64)) as running:
        yield running


def prompt_ids(running: Hosted, body: dict[str, Any]) -> list[int]:
    """Return the tokens that the model is asked to go on from."""
    model = running.model
    start, asked = model.astart, list[list[int]]()

    def note(token_ids: Any, options: Any) -> Any:
        asked.append(list(token_ids))
        return start(token_ids, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "astart", note)
        answer = running.answer("/infill", {**body, "n_predict": 0})
    (ids,) = asked
    assert answer["tokens_evaluated"] == len(ids)
    return ids


def ids_of(running: Hosted, *parts: str) -> list[int]:
    """Return the tokens of texts, each read by itself; the names of control tokens are read as these."""
    read = running.model.target.vocabulary.tokenize
    return [each for part in parts for each in read(part, add_special=False, parse_special=True)]


def opening(running: Hosted) -> list[int]:
    return running.model.target.vocabulary.tokenize("")


def test_the_prompt_has_its_parts_in_llama_servers_order(filler: Hosted) -> None:
    prefix, suffix, middle = NAMES
    repository, file = FILE_NAMES
    others = [repository, "myproject\n", file, "sums.py\n", EXTRA[0]["text"], file, "tmp\n", EXTRA[1]["text"]]
    gap = ids_of(filler, prefix, BEFORE, "    print(", suffix, BEHIND, middle)
    expected = [*ids_of(filler, *others, file, "filename\n"), *opening(filler), *gap]
    assert prompt_ids(filler, {**GAP, "prompt": "    print(", "input_extra": EXTRA}) == expected


def test_without_tokens_for_files_further_texts_are_parted_by_a_line(tmp_path: Path) -> None:
    path = with_last_tokens(tmp_path / "plain.gguf", NAMES)
    with hosted(lambda: serve(path), ServerOptions(spm_infill=True)) as running:
        prefix, suffix, middle = NAMES
        line = "\n\n--- snippet ---\n\n"
        others = ids_of(running, line, EXTRA[0]["text"], line, EXTRA[1]["text"])
        # What is behind the gap comes first.
        gap = ids_of(running, suffix, BEHIND, prefix, BEFORE, middle)
        assert prompt_ids(running, {**GAP, "input_extra": EXTRA}) == [*others, *opening(running), *gap]


def test_what_is_near_the_gap_is_kept_and_the_end_of_further_texts(filler: Hosted) -> None:
    before, behind = [f"a = {number}\n" for number in range(60)], [f"b = {number}\n" for number in range(60)]
    texts = {"input_prefix": "".join(before), "input_suffix": "".join(behind), "prompt": "c"}
    ids = prompt_ids(filler, texts)
    prefix, suffix, middle = ids_of(filler, *NAMES)
    start, gap = ids.index(prefix), ids.index(suffix)
    assert ids[start + 1 : gap] == [*ids_of(filler, texts["input_prefix"])[-48:], *ids_of(filler, "c")]
    assert ids[gap + 1 : -1] == ids_of(filler, texts["input_suffix"])[: 16 - 2 - 1]
    assert ids[-1] == middle
    extra = [{"text": "".join(before)}, {"text": "".join(behind)}]
    long = prompt_ids(filler, {**texts, "input_extra": extra})
    repository, file = FILE_NAMES
    others = ids_of(filler, repository, "myproject\n", file, "tmp\n", extra[0]["text"], file, "tmp\n")
    others = [*others, *ids_of(filler, extra[1]["text"], file, "filename\n")]
    assert len(others) > CONTEXT - 64
    around = ids[start - len(opening(filler)) :]
    # One token of the context is for the answer.
    assert long == [*others[len(around) + 1 - CONTEXT :], *around]
    assert len(long) < CONTEXT
    # There is room for the answer.
    answer = filler.answer("/infill", {**texts, "input_extra": extra, "n_predict": 50, "ignore_eos": True})
    assert (answer["tokens_predicted"], answer["truncated"]) == (50, False)


def test_a_gap_gets_the_text_of_its_prompt_streamed_and_whole_drafted_and_plain(filler: Hosted) -> None:
    body = {**GAP, "input_extra": EXTRA, "ignore_eos": True}
    ids = prompt_ids(filler, body)
    answer = filler.answer("/infill", body)
    rest = {name: value for name, value in body.items() if not name.startswith("input_")}
    assert answer["content"] == filler.answer("/completion", {**rest, "prompt": ids})["content"]
    assert "warnings" not in answer
    assert answer["content"] == filler.answer("/infill", {**body, "speculative": {"off": True}})["content"]
    chunks = filler.chunks("/completion", {**rest, "prompt": ids})
    assert "".join(chunk["content"] for chunk in chunks) == answer["content"]


def test_further_texts_are_drafted_from(filler: Hosted) -> None:
    copied = "".join(f"value_{number} = table[{number * 7}]\n" for number in range(12))
    # The answer that the model gives by itself stands in a further text.
    said = filler.answer("/infill", {**GAP, "n_predict": 40, "ignore_eos": True})["content"]
    body = {**GAP, "n_predict": 40, "ignore_eos": True, "input_extra": [{"text": copied + BEFORE + said}]}
    timings = filler.answer("/infill", body)["timings"]
    assert timings["draft_n"] > 0


def test_requests_of_llama_vim_are_answered_as_it_reads_them(filler: Hosted) -> None:
    """It warms the cache first, and asks then; llama.vscode sends the same fields, and wants several answers."""
    warming = {
        **{"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0},
        **{"temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 1},
        **{"t_max_predict_ms": 1, "response_fields": [""]},
    }
    assert filler.answer("/infill", warming) == {}
    timings = ["prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms"]
    fields = ["content", *(f"timings/{name}" for name in timings), "truncated", "tokens_cached"]
    asking = {
        **{"id_slot": 0, "input_prefix": BEFORE, "input_suffix": BEHIND, "input_extra": EXTRA, "prompt": "    pri"},
        **{"n_predict": 12, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": False},
        **{"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500},
        **{"t_max_predict_ms": 1000, "response_fields": fields},
    }
    answer = filler.answer("/infill", asking)
    assert set(answer) == set(fields)
    # The texts were read before.
    assert answer["timings/prompt_n"] < answer["tokens_cached"] - answer["timings/predicted_n"]
    assert len(filler.answer("/infill", {**asking, "n_cmpl": 3})) == 3


def test_the_sampling_step_infill_ends_a_gap_with_drafts_and_without(filler: Hosted) -> None:
    body = {**GAP, "temperature": 1.0, "seed": 3, "n_predict": 200, "top_k": 40, "input_extra": EXTRA}
    answer = filler.answer("/infill", {**body, "samplers": ["top_k", "infill"]})
    assert "warnings" not in answer
    assert answer["generation_settings"]["samplers"] == ["top_k", "infill"]
    assert (answer["stop_type"], answer["tokens_predicted"] < 200) == ("eos", True)
    for fields in ({"speculative": {"off": True}, "samplers": "ki"}, {"samplers": ["top_k", "adaptive_p", "infill"]}):
        again = filler.answer("/infill", {**body, **fields})
        assert (again["content"], again["stop_type"]) == (answer["content"], "eos")
    # An answer that may not end yet goes on, also within a grammar.
    least = filler.answer("/infill", {**body, "samplers": "ki", "min_tokens": 150})
    assert least["tokens_predicted"] >= 150
    held = filler.answer("/infill", {**body, "samplers": "ki", "grammar": 'root ::= "abcdefgh" [a-z]{40}'})
    assert len(held["content"]) == 48


def test_a_line_that_is_not_indented_ends_the_answer(filler: Hosted) -> None:
    body = {**GAP, "grammar": 'root ::= "a\\n    b\\nc\\n"', "n_predict": 40}
    assert filler.answer("/infill", body)["content"] == "a\n    b\nc\n"
    answer = filler.answer("/infill", {**body, "n_indent": 4})
    assert (answer["content"], answer["stop_type"]) == ("a\n    b\n", "limit")
    chunks = filler.chunks("/completion", {**body, "prompt": "x", "n_indent": 4})
    assert "".join(chunk["content"] for chunk in chunks) == answer["content"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_suffix": {"a": 1}}, "input_suffix"),
        ({"input_prefix": [10**6]}, "input_prefix"),
        ({"prompt": [1]}, "prompt"),
        ({"input_extra": "text"}, "input_extra"),
        ({"input_extra": [{}]}, "input_extra"),
        ({"input_extra": [{"filename": "ok"}]}, "input_extra"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra"),
        ({"input_extra": [{"filename": "a", "text": 456}]}, "input_extra"),
        ({"input_extra": [{"text": ""}] * 5000}, "input_extra"),
        ({"input_prefix": "a" * (3 << 20)}, "input_prefix"),
        ({"n_indent": -1}, "n_indent"),
    ],
)
def test_fields_that_cannot_be_used_are_refused_by_name(filler: Hosted, changes: dict[str, Any], field: str) -> None:
    error = filler.refusal("/infill", {**GAP, **changes})
    assert (error["type"], error["param"]) == ("invalid_request_error", field)


def test_a_prompt_that_leaves_no_room_is_refused_with_its_length(filler: Hosted) -> None:
    error = filler.refusal("/infill", {**GAP, "prompt": "x = 1\n" * 300})
    assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", CONTEXT)


def test_a_model_without_tokens_for_gaps_says_so() -> None:
    with hosted(lambda: serve(embedded_draft())) as running:
        error = running.refusal("/infill", GAP, 501)
    assert error["type"] == "not_supported_error"
    words = "Infill is not supported by this model: prefix token is missing. suffix token is missing. middle token is"
    assert error["message"].startswith(words)


def test_unknown_fields_of_further_texts_are_named(filler: Hosted) -> None:
    answer = filler.answer("/infill", {**GAP, "input_extra": [{"text": "a", "langauge": "py"}], "n_predict": 1})
    assert answer["warnings"] == ["unknown field 'input_extra[0].langauge' was ignored"]
