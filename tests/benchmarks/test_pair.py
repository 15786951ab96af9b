"""The evaluation of a pair: its figures by hand, and the whole of it on scripted engines."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmarks.__main__ import app
from benchmarks.pair.evaluation import (
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
from benchmarks.pair.live import write
from benchmarks.pair.measures import (
    ALL,
    Tally,
    coupled_acceptance,
    depths,
    ratio,
    share,
)
from benchmarks.pair.reading import acceptance, copied, fitted, loss, paired_rows, rows
from benchmarks.pair.report import markdown, print_tables, tables
from rich.console import Console
from typer.testing import CliRunner

from paceline.api import Model
from paceline.core.arrays import Float64Array
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.core.verify import CoupledVerifier
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary
from paceline.models.embedded import HELDOUT_KINDS
from paceline.planning.policies.fixed import FixedPolicy

VOCAB = 12


def noisy_model(seed: int, *, follows: int = 3, scale: float = 2.0) -> LogitFunction:
    """Return a model whose row depends on the last ``follows`` tokens."""

    def logits(tokens: Sequence[int]) -> Float64Array:
        rng = np.random.default_rng([seed, *tokens[-follows:]])
        row: Float64Array = scale * rng.normal(size=VOCAB)
        return row

    return logits


def engine(
    model: LogitFunction, *, max_rows: int = 512, max_outputs: int | None = None, max_sequences: int = 64
) -> ScriptedEngine:
    vocabulary = ScriptedVocabulary.of_size(VOCAB, end_ids=[0])
    return ScriptedEngine(
        model,
        vocabulary,
        context_length=512,
        max_rows=max_rows,
        max_outputs=max_outputs,
        max_sequences=max_sequences,
    )


def scripted_pair(draft: LogitFunction | None = None) -> Model:
    """Return a pair whose draft is its target with some noise."""
    target, noise = noisy_model(1), noisy_model(2, scale=1.0)
    drafter = DraftModelDrafter(engine(draft or (lambda t: target(t) + noise(t))), target_vocab_size=VOCAB)
    return Model(engine(target), [drafter], FixedPolicy(DRAFT_LENGTH))


def some_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(count)]


class TestCoupledAcceptance:
    def test_by_hand(self) -> None:
        # i = 0: 1 / (max(1, 1) + max(1, 3)) = 1/4; i = 1: 1 / (max(1, 1/3) + max(1, 1)) = 1/2.
        value = coupled_acceptance(np.array([0.5, 0.5]), np.array([0.25, 0.75]))
        assert value == pytest.approx(1 / (1 + 3) + 1 / (1 + 1))

    def test_equal_distributions_always_agree(self) -> None:
        probs = np.random.default_rng(0).dirichlet(np.full(50, 0.3))
        assert coupled_acceptance(probs, probs) == pytest.approx(1.0)

    def test_disjoint_distributions_never_agree(self) -> None:
        assert coupled_acceptance(np.array([0.4, 0.6, 0.0]), np.array([0.0, 0.0, 1.0])) == 0.0

    @pytest.mark.parametrize("seed", range(20))
    def test_equals_the_double_sum(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.full(30, 0.2), size=2)
        # Filters leave zeros, in places of their own for each.
        p[rng.random(30) < 0.3] = 0.0
        q[rng.random(30) < 0.3] = 0.0
        p, q = p / p.sum(), q / q.sum()
        both = [i for i in range(30) if p[i] > 0 and q[i] > 0]
        expected = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(30)) for i in both)
        assert coupled_acceptance(p, q) == pytest.approx(expected, rel=1e-9)

    def test_stands_probabilities_whose_quotient_overflows(self) -> None:
        value = coupled_acceptance(np.array([1.0, 1e-200]), np.array([1e-200, 1.0]))
        assert 0.0 <= value < 1e-150

    @pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
    def test_is_how_often_the_verifier_accepts(self, setting: Setting) -> None:
        target_row, draft_row = noisy_model(3)([1]), noisy_model(3)([1]) + noisy_model(4, scale=1.5)([1])
        chance = acceptance(target_row, draft_row, RowSampler(setting.params(0)))
        verifier = CoupledVerifier(setting.params(5))
        trials = 4000
        hits = sum(
            verifier.sampler.emit(target_row, position, ()) == verifier.propose(draft_row, position, (), 1)[0].token_id
            for position in range(trials)
        )
        # Five standard errors: one false alarm in two million.
        assert abs(hits / trials - chance) <= 5 * math.sqrt(chance * (1 - chance) / trials)


class TestRatios:
    def test_by_hand(self) -> None:
        # 3 of 6; the texts are 2 - 1, 1 - 1.5 and 0 - 0.5 off what that makes of their counts.
        value = ratio([(2, 2), (1, 3), (0, 1)])
        assert value.value == 0.5
        assert value.standard_error == pytest.approx(math.sqrt(3 / 2 * (1.0**2 + 0.5**2 + 0.5**2)) / 6)
        assert (value.trials, value.texts) == (6, 3)

    def test_of_texts_of_one_trial_is_the_usual_error(self) -> None:
        hits = [1] * 30 + [0] * 70
        value = ratio([(hit, 1) for hit in hits])
        assert value.standard_error == pytest.approx(np.std(hits, ddof=1) / math.sqrt(100))

    def test_of_texts_alike_inside_is_wider_than_of_their_tokens(self) -> None:
        by_text = ratio([(50, 50), (0, 50)] * 5)
        by_token = ratio([(hit, 1) for hit in [1, 0] * 250])
        assert by_text.standard_error is not None
        assert by_token.standard_error is not None
        assert by_text.standard_error > 6 * by_token.standard_error

    def test_texts_without_trials_do_not_count(self) -> None:
        assert ratio([(1, 2), (0, 0), (2, 2)]) == ratio([(1, 2), (2, 2)])

    def test_without_error_where_texts_do_not_tell(self) -> None:
        assert ratio([(1, 2)]).standard_error is None
        assert ratio([(4, 4), (9, 9)]).standard_error is None

    def test_of_nothing(self) -> None:
        assert ratio([]).value is None

    def test_pools_kinds(self) -> None:
        tally = Tally()
        tally.add("code", 3, 4)
        tally.add("logs", 1, 4)
        ratios = tally.ratios()
        assert {group: value.value for group, value in ratios.items()} == {"code": 0.75, "logs": 0.25, ALL: 0.5}

    def test_wilson_interval(self) -> None:
        # Newcombe (1998), table I: 81 of 263 and 0 of 20.
        value = share(81, 263)
        assert [value.low, value.high] == pytest.approx([0.2553, 0.3662], abs=1e-4)
        assert share(0, 20).low == 0.0
        assert share(0, 20).high == pytest.approx(0.1611, abs=1e-4)
        assert share(20, 20).high == 1.0

    def test_share_of_nothing(self) -> None:
        assert share(0, 0).value is None


class TestDepths:
    def test_chains_shares(self) -> None:
        chain = depths([[(6, 10), (2, 10)], [(3, 6), (1, 2)], [(0, 3), (1, 1)]])
        assert [at_depth.depth for at_depth in chain] == [1, 2, 3]
        assert [at_depth.accepted.value for at_depth in chain] == [0.4, 0.5, 0.25]
        assert [at_depth.survival for at_depth in chain] == pytest.approx([0.4, 0.2, 0.05])

    def test_error_leaves_out_text_after_text(self) -> None:
        first, second = depths([[(6, 10), (2, 10)], [(3, 6), (2, 2)]])
        # Two texts: each survival without the other is that text's own; the error is half their distance.
        assert first.survival_error == pytest.approx((0.6 - 0.2) / 2)
        assert second.survival_error == pytest.approx((0.6 * 0.5 - 0.2 * 1.0) / 2)

    def test_depth_that_was_never_reached(self) -> None:
        chain = depths([[(0, 10), (0, 5)], [(0, 0), (0, 0)], [(0, 0), (0, 0)]])
        assert chain[0].survival == 0.0
        assert (chain[1].accepted.value, chain[1].survival, chain[2].survival) == (None, None, None)


class TestReading:
    def test_rows_are_those_of_the_model_in_passes_of_any_size(self) -> None:
        model, token_ids = noisy_model(1), some_tokens(150)
        for (max_rows, max_outputs), first in itertools.product(((512, None), (7, None), (512, 3)), (1, 2, 65, 149)):
            reader = engine(model, max_rows=max_rows, max_outputs=max_outputs)
            read = np.concatenate(list(rows(reader, token_ids, first)))
            expected = [model(token_ids[:index]) for index in range(first, len(token_ids))]
            assert np.array_equal(read, np.stack(expected))

    def test_frees_its_sequence(self) -> None:
        reader = engine(noisy_model(1), max_sequences=1)
        for _ in range(3):
            next(iter(rows(reader, some_tokens(200))))
            assert len(list(rows(reader, some_tokens(10)))) == 1

    def test_pairs_rows_by_token(self) -> None:
        target, draft, token_ids = noisy_model(1), noisy_model(2), some_tokens(100)
        paired = list(paired_rows(engine(target), engine(draft, max_rows=9), token_ids, 40))
        assert [index for index, _, _ in paired] == list(range(40, 100))
        assert all(np.array_equal(row, target(token_ids[:index])) for index, row, _ in paired)
        assert all(np.array_equal(row, draft(token_ids[:index])) for index, _, row in paired)

    def test_draft_rows_have_the_targets_width(self) -> None:
        row = np.array([1.0, 2.0, 3.0])
        assert fitted(row, 2).tolist() == [1.0, 2.0]
        assert fitted(row, 4).tolist() == [1.0, 2.0, 3.0, -math.inf]

    def test_loss_of_a_uniform_model(self) -> None:
        vocabulary = ScriptedVocabulary([b"", b"a", b"bc", b"def"])
        uniform = ScriptedEngine(lambda tokens: np.full(4, 3.0), vocabulary)
        on_text = loss(uniform, [3, 1, 2, 0, 3])
        assert on_text.nats == pytest.approx(4 * math.log(4))
        assert (on_text.tokens, on_text.num_bytes) == (4, 1 + 2 + 0 + 3)

    def test_loss_reads_the_row_before_each_token(self) -> None:
        model, token_ids = noisy_model(1), some_tokens(140)
        expected = 0.0
        for index in range(1, len(token_ids)):
            row = model(token_ids[:index])
            expected -= row[token_ids[index]] - math.log(np.exp(row).sum())
        assert loss(engine(model), token_ids).nats == pytest.approx(expected)

    def test_counts_what_is_copied(self) -> None:
        """A model that says the successor of its last token copies only runs."""
        successor = engine(lambda tokens: np.eye(VOCAB)[(tokens[-1] + 1) % VOCAB])
        assert copied(successor, [1, 2, 3], [4, 5, 9, 10]) == 3


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
            verifier = CoupledVerifier(setting.params(3))
            token_ids = [*prompt_ids, *text.token_ids]
            drafter = model.drafters[0]
            assert isinstance(drafter, DraftModelDrafter)
            rows_of_draft = paired_rows(model.target, drafter.engine, token_ids, len(prompt_ids))
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


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--prompts", "0"], "--prompts 0 is out of range: give 1 or more"),
            (["--tokens", "500"], "--tokens 500 is out of range: give 1 to 384"),
            (["--kinds", "code,verse"], "there is no held-out text of kind 'verse'"),
            (["--kinds", "code,code"], "--kinds names code twice"),
            (["--kinds", ","], "--kinds names no kind of text"),
            (["--threads", "0"], "--threads 0 is out of range"),
            (["--seed", "-1"], "--seed -1 is out of range"),
            (["--target", "big.gguf"], "--target without --draft"),
            (["--json", "nowhere/pair.json"], "there is no directory nowhere"),
            (["--markdown", "."], ". is a folder"),
        ],
    )
    def test_refuses_before_anything_is_loaded(
        self, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("benchmarks.pair.command.load", lambda *_, **__: pytest.fail("loaded a model"))
        result = CliRunner().invoke(app, ["pair", *arguments])
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)

    def test_writes_its_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.pair.command.load", lambda *_, **__: scripted_pair())
        monkeypatch.setattr("benchmarks.pair.command.heldout", lambda kind: [chr(ord("!") + len(kind)) * 40] * 3)
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

    def test_prints_json_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.pair.command.load", lambda *_, **__: scripted_pair())
        monkeypatch.setattr("benchmarks.pair.command.heldout", lambda kind: ["#$%&" * 5])
        command = ["pair", "--prompts", "1", "--tokens", "4", "--kinds", "logs", "--json", "-"]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert json.loads(result.stdout)["pair"]["texts"] == {"logs": 1}


def test_settings_differ_only_in_what_they_say() -> None:
    assert SAMPLED.params(4) == SamplingParams(seed=4)
    unfiltered = Setting(0.8, filters=False).params(4)
    assert (unfiltered.top_k, unfiltered.top_p, unfiltered.min_p) == (0, 1.0, 0.0)
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
