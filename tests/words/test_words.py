"""No old private term in what a user sees, and no docstring that only points at another."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.words.__main__ import app
from tests.words.collecting import Seen, bodies, keys, strings
from tests.words.counting import SEEN_BY_USERS, docstring_faults, figures, find
from tests.words.docstrings import Fault, constant_faults, entries, entry_faults
from tests.words.terms import TERMS, prose_of, words_of

# Sentences that users could read once, and what is meant.
PRIVATE = [
    ("Looks at a draft that was given up follow each other at once while they are right.", "look"),
    ("A look that was right is followed by others at once.", "look"),
    ("A draft model that was given up is looked at now and then.", "look"),
    ("A draft that turned good is verified after two looks.", "look"),
    ("Until the next look is due nothing has to be decided.", "look"),
    ("All requests may lose 0.7 %: looks take 0.5 %.", "look"),
    ("Elsewhere it is 1.01 faster: that is what looking costs there.", "look"),
    ("More may be risked where drafts that could not be afforded win on paper.", "paper"),
    ("Two paper rounds in a row are enough.", "paper"),
    ("A rest of up to 32 plain rounds is one decision.", "rest"),
    ("Rests of 32 rounds cost nothing.", "rest"),
    ("The draft model is resting.", "rest"),
    ("Nothing is asked while it is lying down.", "rest"),
    ("A new request is heard.", "hearing"),
    ("The hearing takes eight rounds.", "hearing"),
    ("What asking brought, beside other drafts and alone, is remembered.", "company"),
    ("A lookup in company is right more often.", "company"),
    ("Gains alone count more than gains beside others.", "company"),
    ("After a comeback it is asked every round.", "comeback"),
    ("The drafter is unmet so far.", "unmet"),
    ("The next process starts with what is in keeping.", "keeping"),
    ("Under rejection the decision is made blind.", "blind"),
    ("A twentieth is hoped.", "hoped, doubted, tried share"),
    ("The tried share is 0.5 %.", "hoped, doubted, tried share"),
]

# Every exception of a term is needed for one of these.
ORDINARY = [
    "Two drafters look up what the text itself said before, and look for a match near the last one.",
    "Drafting looks cheap where plain decoding looks slower than it is.",
    "A draft model of the hub is used as it lies in the cache, without a look at the network.",
    "A drafter's name is taken without a look for a newer one.",
    "A kept cost profile is looked at when a draft model is loaded.",
    "The drafts' report is a page to look at.",
    "A clock is looked at now and then.",
    "See the paper by Leviathan et al.",
    "The rest of the answer is decoded plainly; the rest of the drafts is dropped.",
    "The server has a REST interface.",
    "Weights are used as they lie in the file.",
    "An observer hears of every round.",
    "A prompt that is read beside answers is read in chunks.",
    "Measured with the draft model alone, or alone with the drafts of a lookup.",
    "A drafter that was asked and left alone afterwards, or left alone for good, drafts nothing.",
    "Answers keep to a schema; keeping to it costs nothing.",
    "Keeping with the beginning in keeping with the schema.",
    "The page can be used by blind people and with colour-blindness.",
    "Eighteen settings were tried.",
]


@pytest.mark.parametrize(("sentence", "old"), PRIVATE)
def test_private_terms_are_found(sentence: str, old: str) -> None:
    assert {found.term.old for found in find([Seen("", sentence)])} == {old}


@pytest.mark.parametrize("sentence", ORDINARY)
def test_ordinary_english_is_left(sentence: str) -> None:
    assert [found.words for found in find([Seen("", sentence)])] == []


def test_every_exception_says_why_and_is_needed() -> None:
    exceptions = [each for term in TERMS for each in term.allowed]
    assert exceptions
    for each in exceptions:
        assert each.why, each.pattern
        assert any(re.search(each.pattern, sentence, re.IGNORECASE) for sentence in ORDINARY), each.pattern
    for term in TERMS:
        for name, why in term.allowed_names:
            assert why, name
            assert set(words_of(name)) & set(term.words), f"{name} has no word of {term.old!r}"


def test_names_are_told_by_their_words() -> None:
    assert words_of("LONGEST_REST") == ["longest", "rest"]
    assert words_of("PaperRound") == ["paper", "round"]
    names = [Seen("", name, is_name=True) for name in ("PaperRound", "lookup", "rest")]
    found = {each.words: each.term.old for each in find(names)}
    assert found == {"PaperRound": "paper"}
    # What is ordinary elsewhere is the planner's own word in its code.
    assert [each.words for each in find([Seen("src/paceline/planning/auto/x.py:1", "rest", is_name=True)])] == ["rest"]


def test_prose_leaves_code_out_and_keeps_places() -> None:
    text = "# Title\n\nA look, see `looks.py`,\nthen more.\n\n```\ncode\n```\n- one\n- two\n"
    assert list(prose_of(text)) == [(1, "# Title"), (3, "A look, see  , then more."), (9, "- one"), (10, "- two")]


def test_strings_are_those_a_program_may_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.words.collecting.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(
        '"""Docstring."""\nLIMIT = 3\n"""Of a thing."""\n\n\ndef f(x):\n    """Docstring."""\n'
        '    print(f"there are {x} and {LIMIT} at most")\n    return {"key": "value of it", **x}\n'
    )
    assert [(seen.place, seen.text) for seen in strings(tmp_path)] == [
        ("module.py:8", "there are   and   at most"),
        ("module.py:9", "value of it"),
    ]


def test_keys_are_those_of_reports_and_requests() -> None:
    # One of a mapping, of a dataclass that becomes JSON, and of a profile.
    assert {"accept_share", "differs_at", "change_s"} <= {seen.text for seen in keys()}
    fields = list(bodies())
    assert "max_completion_tokens" in {seen.text for seen in fields if seen.is_name}
    assert "What a stream sends beside the text." in {seen.text for seen in fields if not seen.is_name}


@pytest.mark.parametrize("where", SEEN_BY_USERS)
def test_no_user_sees_a_private_term(where: str) -> None:
    texts = list(SEEN_BY_USERS[where]())
    assert len(texts) > 100, "what is searched was not found"
    assert [f"{each.place}: {each.words!r} ({each.term.say})" for each in find(texts)] == []


def test_the_command_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.words.__main__.figures", functools.cache(figures))
    result = CliRunner().invoke(app, ["--json"])
    counted = json.loads(result.stdout)
    assert result.exit_code == (1 if any(each["total"] for each in counted["users"].values()) else 0)
    table = CliRunner().invoke(app, []).stdout
    assert re.search(rf"^identifiers .* {counted['code']['identifiers']['total']} ", table, re.MULTILINE)


@pytest.mark.parametrize(
    "text",
    [
        "it.",
        "its type.",
        "likewise.",
        "likewise; ``None`` without a draft model.",
        "the same of a plain one.",
        "for the same requests.",
        "how many.",
        "as it was given.",
        "of these, what was read.",
        "tokens for each second, of the same.",
        "rows that were read, and",
    ],
)
def test_descriptions_that_point_back_are_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        'def f(a, b):\n    """Do.\n\n    Args:\n        a: the first\n            of two.\n'
        f'        b: {text}\n    """\n'
    )
    assert list(entry_faults(path, tmp_path)) == [Fault("module.py:1", "f.b", text)]


@pytest.mark.parametrize(
    "text",
    ["it is said how.", "the drafter to ask.", "of the model.", "these tokens, in order.", "its own rows, in order."],
)
def test_descriptions_that_say_something_are_left(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'class C:\n    """Is.\n\n    Attributes:\n        a: {text}\n    """\n')
    assert list(entry_faults(path, tmp_path)) == []


def test_entries_are_those_of_arguments_and_attributes() -> None:
    docstring = (
        "Do.\n\nArgs:\n    a, b: two\n        lines: of it.\n    **c: more.\n\n"
        "Raises:\n    Error: likewise.\n\nIt: ends."
    )
    assert list(entries(docstring)) == [("a, b", "two lines: of it."), ("**c", "more.")]


def test_constants_have_a_docstring_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        'LOW = 1\n_HIGH = 2\n"""Limits."""\n\n_ALONE = 3\n\nSECOND = 4\n"""Likewise."""\n'
        'THIRD: int = 5\n"""Rows."""\n'
        "_PRIVATE = 6\n_PAIR = 7\n\nPUBLIC = 8\nT = 9\n"
    )
    assert sorted((fault.name, fault.text) for fault in constant_faults(path, tmp_path)) == [
        ("LOW", "Limits."),
        ("PUBLIC", ""),
        ("SECOND", "Likewise."),
    ]


# The planner, whose docstrings follow with its names.
ELSEWHERE = "src/paceline/planning/"


def test_docstrings_stand_by_themselves() -> None:
    faults = [fault for found in docstring_faults() for fault in found]
    assert [fault for fault in faults if not fault.place.startswith(ELSEWHERE)] == []
