"""Pages of reports in a browser: readable on a phone, whatever the names, in both themes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser

from paceline.engines.options import DraftOptions, ModelOptions
from paceline.lab.agreement import measure_agreement, measure_survival
from paceline.lab.bench.report import build_report as bench_report
from paceline.lab.bench.runner import Runner
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.capacity.report import Targets
from paceline.lab.capacity.report import build_report as plan_report
from paceline.lab.capacity.traffic import Traffic
from paceline.lab.disagreement.comparer import OwnAnswers, compare_models
from paceline.lab.disagreement.report import build_report as compare_report
from paceline.lab.doctor.candidates import Skipped
from paceline.lab.doctor.examiner import Diagnosis
from paceline.lab.doctor.report import advise
from paceline.lab.doctor.report import build_report as doctor_report
from paceline.lab.profile_page import build_report as profile_report
from paceline.lab.report import Report, render_page
from paceline.lab.samples import heldout_samples
from paceline.lab.vocabulary_fit import compare_vocabularies
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from tests.lab.capacity.scenes import found
from tests.lab.doctor.scenes import KINDS, partly, predicted, recordings_of, written_by
from tests.lab.scripted_pairs import bytes_vocabulary, engines, profile
from tests.page.visiting import PHONE, WIDE, Theme, serious

LONG: Final = "a/folder/whose/name/is/long/and-a-model-whose-name-is-too-0123456789-Q4_K_M.gguf"
MACHINE: Final = {"processor": "some processor, 2 cores", "system": "Linux", "threads": "2"}

FAULTS: Final = """() => {
    const width = document.documentElement.clientWidth, faults = [];
    for (const element of document.querySelectorAll("body *")) {
        const box = element.getBoundingClientRect();
        const isCut = box.width && (box.right > width + 1 || box.left < -1);
        if (isCut) faults.push(`${element.outerHTML.slice(0, 80)} is cut`);
    }
    for (const picture of document.querySelectorAll("svg.picture, svg.track")) {
        const whole = picture.getBoundingClientRect();
        const texts = [...picture.querySelectorAll("text")];
        const labels = texts.map(label => [label.textContent, label.getBoundingClientRect()]);
        labels.forEach(([words, box], index) => {
            if (box.left < whole.left - 1 || box.right > whole.right + 1) faults.push(`${words} is outside`);
            for (const [others, other] of labels.slice(index + 1))
                if (box.left < other.right - 1 && other.left < box.right - 1
                    && box.top < other.bottom - 2 && other.top < box.bottom - 2)
                    faults.push(`${words} is on ${others}`);
        });
    }
    return faults;
}"""


def bench() -> Report:
    settings = BenchSettings(
        ("new-code", "structured-forced"), ("static", "heuristic", "auto"), ("suffix", "draft"), laps=3, tokens=33
    )
    result = Runner(engines(pass_s=(1.0, 1.1, 0.9, 1.3)), profile(), settings, machine=MACHINE).run()
    best = result.workloads[0].best("auto")
    assert best is not None
    best.snapshot = {
        "calibration": {"draft": [(0.1, 0.15, 40), (0.9, 0.88, 300)], "suffix": [(0.5, 0.45, 20)]},
        "ledger": [(tokens, 0.001 * (tokens % 7) - 0.0001 * tokens, 0.02) for tokens in range(300)],
    }
    result.target = LONG
    return bench_report(result)


def doctor() -> Report:
    candidates = []
    vocabulary = bytes_vocabulary()
    fitting = compare_vocabularies(vocabulary, vocabulary, {})
    for name, right in ((LONG, 1), ("small.gguf", 3)):
        found = engines(draft=partly(right))
        written = written_by(found)
        assert found.draft is not None
        agreement = measure_agreement(found.draft, written, target_vocab_size=256, unshared_ids=(), temperature=0.0)
        survival = measure_survival(recordings_of(right), KINDS)
        what = describe(embedded_draft())
        diagnosis = Diagnosis(name, what, fitting, agreement, survival, predicted(right)[0], profile())
        candidates.append(advise(diagnosis, describe(embedded_target()), ("llama-server", "vllm", "transformers")))
    target = dataclasses.replace(describe(embedded_target()), path=Path(LONG))
    return doctor_report(target, candidates, [Skipped(LONG, "it is none")], temperature=0.0, machine=MACHINE)


def profiled() -> Report:
    return profile_report(profile(), target=LONG, draft=LONG, machine=MACHINE)


def compared() -> Report:
    target = ModelOptions(embedded_target(), context_length=256, threads=1)
    draft = DraftOptions(path=embedded_draft()).beside(target)
    found = compare_models(target, draft, OwnAnswers(heldout_samples(), 4, 40, keep=False), temperature=0.8)
    named = [dataclasses.replace(describe(path()), path=Path(LONG)) for path in (embedded_target, embedded_draft)]
    return compare_report(named[0], named[1], found, temperature=0.8, machine=MACHINE)


def planned() -> Report:
    return plan_report(
        found(),
        {"Poisson": Traffic(4.0)},
        Targets(ttft_s=0.5, tpot_s=0.1),
        names=[f"target: {LONG}", f"draft: {LONG}"],
        slots=4,
        machine=MACHINE,
        left_out=["2 of 4 answers"],
    )


@pytest.mark.parametrize("report", [bench, doctor, profiled, compared, planned])
def test_everybody_can_read_a_report(
    browser: Browser, axe: str, screenshots: Path, report: Callable[[], Report]
) -> None:
    page_text, page_name = render_page(report()), report.__name__
    themes: tuple[Theme, ...] = ("light", "dark")
    for (width, height), theme in ((size, theme) for size in (PHONE, (390, 844), (800, 800), WIDE) for theme in themes):
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        page.set_content(page_text)
        page.screenshot(path=screenshots / f"{page_name}-{width}-{theme}.png", full_page=True)
        faults = [*page.evaluate(FAULTS), *serious(page, axe)]
        assert not faults, f"{width} {theme}: " + "\n".join(faults)
        page.close()
