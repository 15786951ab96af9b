"""What is said of candidates: the best first, alike on a terminal, on a page and as JSON."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from io import StringIO

import pytest
from rich.console import Console

from paceline.engines.scripted import ScriptedVocabulary
from paceline.lab.agreement import measure_agreement, measure_survival
from paceline.lab.doctor.candidates import Skipped
from paceline.lab.doctor.examiner import Diagnosis
from paceline.lab.doctor.report import Candidate, advise, build_report, candidate_json
from paceline.lab.report import Report, print_report, render_page
from paceline.lab.vocabulary_fit import VocabularyFit, compare_vocabularies
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from tests.lab.doctor.scenes import KINDS, partly, predicted, recordings_of, written_by
from tests.lab.scripted_pairs import engines, profile

TARGET, MODEL = describe(embedded_target()), describe(embedded_draft())
LETTERS = [bytes([letter]) for letter in b"abcdefgh "]


def fit(draft: list[bytes]) -> VocabularyFit:
    return compare_vocabularies(ScriptedVocabulary(LETTERS), ScriptedVocabulary(draft), {"code": ["abc", "cab"]})


def examined(name: str, right: int) -> Candidate:
    found = engines(draft=partly(right))
    written = written_by(found)
    assert found.draft is not None
    agreement = measure_agreement(found.draft, written, target_vocab_size=256, unshared_ids=(), temperature=0.0)
    survival = measure_survival(recordings_of(right), KINDS)
    prediction, _ = predicted(right)
    diagnosis = Diagnosis(name, MODEL, fit(LETTERS), agreement, survival, prediction, profile())
    return advise(diagnosis, TARGET, ("llama-server", "vllm"))


@pytest.fixture(scope="module")
def candidates() -> list[Candidate]:
    other = Diagnosis("other.gguf", MODEL, fit(LETTERS[::-1]), error="its tokens are other ones")
    broken = Diagnosis("<b>broken[/b].gguf", MODEL, None, error="it is none")
    bad, good = examined("bad.gguf", 0), examined("good.gguf", 4)
    return sorted([advise(broken, TARGET, ()), bad, advise(other, TARGET, ()), good], key=lambda each: each.rank)


@pytest.fixture(scope="module")
def report(candidates: list[Candidate]) -> Report:
    machine = {"processor": "some, 2 cores", "threads": "2"}
    return build_report(TARGET, candidates, [Skipped("x.gguf", "is none")], temperature=0.0, machine=machine)


def test_the_fastest_comes_first_and_what_has_no_prediction_last(candidates: list[Candidate]) -> None:
    assert [each.diagnosis.name[:4] for each in candidates] == ["good", "bad.", "othe", "<b>b"]


def test_a_terminal_and_a_page_say_the_same(report: Report, candidates: list[Candidate]) -> None:
    screen = StringIO()
    print_report(Console(file=screen, width=500), report)
    shown, page = screen.getvalue(), render_page(report)
    said = [line for each in candidates for line in (*each.advice, *(one.command for one in each.exports))]
    words = [
        "some, 2 cores, threads 2",
        "does not pay: ",
        "pays: ",
        "refused: vLLM",
        "not drafted with: it is none",
        *said,
    ]
    for each in words:
        assert each in shown
        assert each in page.replace("&#39;", "'").replace("&#34;", '"')
    # Neither markup of pages nor of consoles is read into a name.
    assert "<b>broken[/b].gguf" in shown
    assert "<b>broken" not in page


def test_a_narrow_terminal_shows_every_figure(report: Report) -> None:
    screen = StringIO()
    print_report(Console(file=screen, width=60), report)
    assert "…" not in screen.getvalue()
    assert re.search("^all .*100", screen.getvalue(), re.MULTILINE)


def test_charts_are_well_formed(report: Report) -> None:
    charts = re.findall(r"<figure>(.*?)</figure>", render_page(report), flags=re.DOTALL)
    assert len(charts) == 1 + 2 * 3
    for chart in charts:
        assert ElementTree.fromstring(chart).attrib["aria-label"]
        assert "nan" not in chart


def test_json_has_all_figures(candidates: list[Candidate]) -> None:
    good, _, other, _ = (json.loads(json.dumps(candidate_json(each))) for each in candidates)
    assert good["agreement"]["one_minus_tv"]["all"]["value"] == 1.0
    assert good["survival"]["all"][0] == {"depth": 1, "survival": 1.0, "error": None}
    assert good["prediction"]["pays"] is True
    assert {"draft_max", "gain"} == good["prediction"]["lengths"][0].keys()
    assert other["tokens"]["alignment"]["one"]["code"]["value"] == 1.0
    assert other["tokens"]["examples"][0] == {"id": 0, "target": "a", "draft": " "}
