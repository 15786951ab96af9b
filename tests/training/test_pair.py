"""The evaluation of a pair: its figures by hand, and the whole of it on scripted engines."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from training.pair.evaluation import (
    COPIED_TOKENS,
    DRAFT_LENGTH,
    GREEDY,
    PROMPT_TOKENS,
    SAMPLED,
    SETTINGS,
    Evaluation,
    Figures,
    Setting,
    work,
)
from training.pair.logit_rows import read_paired_rows, write
from training.pair.report import markdown, print_tables, tables
from typer.testing import CliRunner

from paceline.api import Model
from paceline.core.arrays import Float64Array
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.core.verify import CoupledVerifier
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.scripted import LogitFunction
from paceline.lab.intervals import ALL
from paceline.models.embedded import HELDOUT_KINDS
from paceline.planning.policies.fixed import FixedPolicy
from tests.lab.doctor.helpers import VOCAB, engine, noisy_model, some_tokens


def scripted_pair(draft: LogitFunction | None = None) -> Model:
    """Return a pair whose draft is its target with some noise."""
    target, noise = noisy_model(1), noisy_model(2, scale=1.0)
    drafter = DraftModelDrafter(engine(draft or (lambda t: target(t) + noise(t))), target_vocab_size=VOCAB)
    return Model(engine(target), [drafter], FixedPolicy(DRAFT_LENGTH))


class TestLiveRuns:
    @pytest.mark.parametrize("setting", [GREEDY, SAMPLED], ids=lambda setting: setting.name)
    def test_verdicts_stand_where_drafts_were_judged(self, setting: Setting) -> None:
        with scripted_pair() as model:
            prompt_ids = some_tokens(20)
            text = write(model, prompt_ids, setting.params(3), 100)
            judged = [verdict for verdict in text.verdicts if verdict is not None]
            assert len(text.verdicts) == len(text.token_ids) == 100
            assert text.verdicts[0] is None
            assert len(judged) == sum(text.tested_by_depth.values())
            assert sum(judged) == sum(text.accepted_by_depth.values())
            assert 0 < sum(judged) < len(judged)
            # What the draft alone says at each place, with the same noise, decides each verdict.
            verifier = CoupledVerifier(RowSampler(setting.params(3)))
            token_ids = [*prompt_ids, *text.token_ids]
            drafter = model.drafters[0]
            assert isinstance(drafter, DraftModelDrafter)
            rows_of_draft = read_paired_rows(model.target, drafter.engine, token_ids, len(prompt_ids))
            for (index, _, row), verdict in zip(rows_of_draft, text.verdicts, strict=True):
                proposal = verifier.propose(row, index, (), 1)[0].token_id
                assert verdict in (None, proposal == token_ids[index])

    def test_writes_on_past_ends(self) -> None:
        with scripted_pair() as model:
            texts = [write(model, some_tokens(5, seed), SAMPLED.params(seed), 60) for seed in range(4)]
        assert all(len(text.token_ids) == 60 for text in texts)
        assert [text.ended for text in texts] == [0 in text.token_ids for text in texts]
        assert any(text.ended for text in texts)


def evaluated(model: Model, texts: dict[str, list[list[int]]], max_tokens: int) -> tuple[Figures, float]:
    done = 0.0

    def advance(step: float) -> None:
        nonlocal done
        done += step

    with model:
        evaluation = Evaluation(model, max_tokens=max_tokens, seed=0, advance=advance)
        for kind, of_kind in texts.items():
            for token_ids in of_kind:
                evaluation.take(kind, token_ids)
        return evaluation.figures(), done


@pytest.fixture(scope="module")
def figures() -> Figures:
    texts = {"code": [some_tokens(200, seed) for seed in range(2)], "logs": [some_tokens(150, 7)]}
    return evaluated(scripted_pair(), texts, 48)[0]


class TestEvaluation:
    def test_counts_texts_and_tokens(self, figures: Figures) -> None:
        assert figures.texts == {"code": 2, "logs": 1}
        assert figures.loss["nats_per_token"]["target"][ALL].trials == 199 + 199 + 149
        assert figures.agreement["held-out"]["code"].trials == 398
        assert figures.agreement[SAMPLED.name][ALL].trials == 3 * 48
        assert figures.looping[GREEDY.name][ALL].texts == 3
        assert figures.copying["with"][ALL].trials == 3 * COPIED_TOKENS

    def test_greedy_acceptance_is_agreement(self, figures: Figures) -> None:
        greedy = figures.coupled[GREEDY.name]
        assert greedy["own"] == figures.agreement[GREEDY.name]
        assert greedy["judged"] == greedy["measured"]
        assert figures.coupled_deviation[GREEDY.name][ALL] is None

    def test_live_acceptance_is_its_closed_form(self) -> None:
        texts = {"code": [some_tokens(30, seed) for seed in range(10)]}
        figures, _ = evaluated(scripted_pair(), texts, 200)
        deviations = [figures.coupled_deviation[setting.name][ALL] for setting in SETTINGS if setting != GREEDY]
        assert len(deviations) == 6
        # Four standard errors in six settings: one false alarm in 2,600.
        assert all(deviation is not None and abs(deviation) < 4 for deviation in deviations)

    def test_live_drafts_are_counted_by_depth(self, figures: Figures) -> None:
        for setting in (GREEDY, SAMPLED):
            chain = figures.chain[setting.name][ALL]
            assert [at_depth.depth for at_depth in chain] == list(range(1, DRAFT_LENGTH + 1))
            tested = [at_depth.accepted.trials for at_depth in chain]
            assert sum(tested) == figures.coupled[setting.name]["measured"][ALL].trials
            assert tested == sorted(tested, reverse=True)
            assert tested[0] > 0

    def test_draft_that_is_the_target_is_always_accepted(self) -> None:
        figures, _ = evaluated(scripted_pair(draft=noisy_model(1)), {"code": [some_tokens(140)]}, 40)
        assert figures.agreement["held-out"][ALL].value == 1.0
        assert [at_depth.survival for at_depth in figures.chain[SAMPLED.name][ALL]] == [1.0] * DRAFT_LENGTH
        for ratios in figures.coupled.values():
            assert [ratios[name][ALL].value for name in ("held-out", "own")] == pytest.approx([1.0, 1.0])
            assert ratios["measured"][ALL].value == 1.0
        assert figures.loss["nats_per_token"]["target"] == figures.loss["nats_per_token"]["draft"]
        assert figures.bars[0].met

    def test_model_that_copies_does_so_only_from_the_first_copy(self) -> None:
        def copying(tokens: Sequence[int]) -> Float64Array:
            """Say what followed the last five tokens when they came before."""
            row = np.zeros(VOCAB)
            tokens = list(tokens)
            for end in range(len(tokens) - 1, 5, -1):
                if tokens[end - 5 : end] == tokens[-5:]:
                    row[tokens[end]] = 1.0
                    break
            return row

        with Model(
            engine(copying), [DraftModelDrafter(engine(copying), target_vocab_size=VOCAB)], FixedPolicy(DRAFT_LENGTH)
        ) as model:
            figures, _ = evaluated(model, {"code": [some_tokens(300)]}, 8)
        assert figures.copying["with"][ALL].value == 1.0
        without = figures.copying["without"][ALL].value
        assert without is not None
        assert without < 0.5

    def test_text_that_repeats_loops(self) -> None:
        clock = engine(lambda tokens: 50.0 * np.eye(VOCAB)[tokens[-1] % 3 + 1])
        drafter = DraftModelDrafter(engine(noisy_model(2)), target_vocab_size=VOCAB)
        figures, _ = evaluated(Model(clock, [drafter], FixedPolicy(DRAFT_LENGTH)), {"code": [some_tokens(40)]}, 30)
        looping = figures.looping[SAMPLED.name][ALL]
        assert (looping.hits, looping.texts) == (1, 1)
        assert not figures.bars[1].met
        # It never says the token that ends a text.
        assert figures.ended[SAMPLED.name][ALL].hits == 0

    def test_held_out_text_that_repeats_is_counted_beside_the_answers(self) -> None:
        texts = [[1, 2, 3] * 60, some_tokens(180), some_tokens(PROMPT_TOKENS + 5)]
        figures, _ = evaluated(scripted_pair(), {"logs": texts}, 30)
        # The last one is too short to stand where an answer stands.
        heldout = figures.looping["held-out"]["logs"]
        assert (heldout.hits, heldout.texts) == (1, 2)

    def test_short_texts_have_no_passage_to_copy(self) -> None:
        figures, _ = evaluated(scripted_pair(), {"logs": [some_tokens(60)]}, 10)
        assert figures.copying["with"][ALL].trials == 0
        assert figures.agreement["held-out"]["logs"].trials == 59

    def test_work_is_what_is_done(self) -> None:
        _, done = evaluated(scripted_pair(), {"code": [some_tokens(520, seed) for seed in range(3)]}, 100)
        assert done == pytest.approx(work(3, 100))


class TestReport:
    def test_markdown_tables_are_whole(self, figures: Figures) -> None:
        text = markdown(tables(figures, 48), figures, {"target": "big.gguf", "draft": "small.gguf"})
        assert "`big.gguf` and `small.gguf`" in text
        assert "(2 of code, 1 of logs)" in text
        blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
        assert len(blocks) == text.count("### ") == 9
        for block in blocks:
            assert len({line.count("|") for line in block}) == 1
        by_kind = next(block for block in blocks if "nats/token" in block[0])
        assert [line.split(" | ")[0] for line in by_kind[2:]] == ["| code", "| logs", "| all"]
        nats = figures.loss["nats_per_token"]["target"]["logs"].value
        assert f"{nats:.3f}" in by_kind[3]

    def test_one_kind_has_no_row_for_all(self) -> None:
        figures, _ = evaluated(scripted_pair(), {"logs": [some_tokens(60)]}, 10)
        assert "| all" not in markdown(tables(figures, 10), figures, {"target": "a", "draft": "b"})

    def test_terminal_shows_the_bars(self, figures: Figures) -> None:
        console = Console(width=140, record=True, file=io.StringIO())
        print_tables(console, tables(figures, 48), figures)
        shown = console.export_text()
        agreement = figures.agreement["held-out"][ALL].value
        assert f"same argmax on held-out text: {agreement:.1%}; wanted at least 65%" in shown
        assert "Chain acceptance by depth, temperature 0.8" in shown

    def test_figures_are_plain_data(self, figures: Figures) -> None:
        plain = json.loads(json.dumps(figures.as_json(), allow_nan=False))
        assert plain["looping"]["greedy"]["all"]["texts"] == 3
        assert set(plain["coupled"]) == {setting.name for setting in SETTINGS}


@pytest.fixture
def app() -> typer.Typer:
    pytest.importorskip("tokenizers", reason="needs paceline[torch]")
    from training.__main__ import app

    return app


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--kinds", "code,verse"], "no held-out text of kind 'verse'"),
            (["--kinds", ","], "--kinds names no kind of text"),
            (["--target", "big.gguf"], "--target without --draft"),
            (["--json", "nowhere/pair.json"], "there is no directory nowhere"),
            (["--markdown", "."], ". is a folder"),
        ],
    )
    def test_refuses_before_anything_is_loaded(
        self, app: typer.Typer, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("training.pair.command.load", lambda *_, **__: pytest.fail("loaded a model"))
        result = CliRunner().invoke(app, ["pair", *arguments])
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)

    def test_writes_its_files(self, app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("training.pair.command.load", lambda *_, **__: scripted_pair())
        monkeypatch.setattr("training.pair.command.heldout", lambda kind: [chr(ord("!") + len(kind)) * 40] * 3)
        models = tmp_path / "big.gguf", tmp_path / "small.gguf"
        for path in models:
            path.write_bytes(b"weights")
        command = ["pair", "--target", str(models[0]), "--draft", str(models[1]), "--prompts", "2", "--tokens", "12"]
        written = tmp_path / "pair.json", tmp_path / "pair.md"
        command += ["--json", str(written[0]), "--markdown", str(written[1])]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0
        report = json.loads(written[0].read_text())["pair"]
        assert report["texts"] == dict.fromkeys(HELDOUT_KINDS, 2)
        digest = hashlib.sha256(b"weights").hexdigest()
        assert report["files"]["draft"] == {"name": "small.gguf", "bytes": 7, "sha256": digest}
        assert "### Copying" in written[1].read_text()
        assert "Answers that loop" in result.stdout
        assert sorted(path.name for path in tmp_path.iterdir()) == ["big.gguf", "pair.json", "pair.md", "small.gguf"]


def test_settings_differ_only_in_what_they_say() -> None:
    assert SAMPLED.params(4) == SamplingParams(seed=4)
    unfiltered = Setting(0.8, filters=False).params(4)
    assert (unfiltered.top_k, unfiltered.top_p, unfiltered.min_p) == (0, 1.0, 0.0)
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
