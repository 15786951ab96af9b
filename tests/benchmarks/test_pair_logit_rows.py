"""Two models that read one text."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from benchmarks.pair.logit_rows import count_copied, measure_loss, read_paired_rows

from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary
from paceline.lab.agreement import fit_width, read_predicting_rows
from tests.lab.doctor.helpers import VOCAB, engine, noisy_model, some_tokens


class TestReading:
    def test_rows_are_those_of_the_model_in_passes_of_any_size(self) -> None:
        model, token_ids = noisy_model(1), some_tokens(150)
        for (max_rows, max_outputs), first in itertools.product(((512, None), (7, None), (512, 3)), (1, 2, 65, 149)):
            reader = engine(model, max_rows=max_rows, max_outputs=max_outputs)
            read = np.stack(list(read_predicting_rows(reader, token_ids, first)))
            expected = [model(token_ids[:index]) for index in range(first, len(token_ids))]
            assert np.array_equal(read, np.stack(expected))

    def test_frees_its_sequence(self) -> None:
        reader = engine(noisy_model(1), max_sequences=1)
        for _ in range(3):
            next(iter(read_predicting_rows(reader, some_tokens(200))))
            assert len(list(read_predicting_rows(reader, some_tokens(10)))) == 9

    def test_pairs_rows_by_token(self) -> None:
        target, draft, token_ids = noisy_model(1), noisy_model(2), some_tokens(100)
        paired = list(read_paired_rows(engine(target), engine(draft, max_rows=9), token_ids, 40))
        assert [index for index, _, _ in paired] == list(range(40, 100))
        assert all(np.array_equal(row, target(token_ids[:index])) for index, row, _ in paired)
        assert all(np.array_equal(row, draft(token_ids[:index])) for index, _, row in paired)

    def test_draft_rows_have_the_targets_width(self) -> None:
        row = np.array([1.0, 2.0, 3.0])
        assert fit_width(row, 2).tolist() == [1.0, 2.0]
        assert fit_width(row, 4).tolist() == [1.0, 2.0, 3.0, -math.inf]

    def test_loss_of_a_uniform_model(self) -> None:
        vocabulary = ScriptedVocabulary([b"", b"a", b"bc", b"def"])
        uniform = ScriptedEngine(lambda tokens: np.full(4, 3.0), vocabulary)
        on_text = measure_loss(uniform, [3, 1, 2, 0, 3])
        assert on_text.nats == pytest.approx(4 * math.log(4))
        assert (on_text.tokens, on_text.num_bytes) == (4, 1 + 2 + 0 + 3)

    def test_loss_reads_the_row_before_each_token(self) -> None:
        model, token_ids = noisy_model(1), some_tokens(140)
        expected = 0.0
        for index in range(1, len(token_ids)):
            row = model(token_ids[:index])
            expected -= row[token_ids[index]] - math.log(np.exp(row).sum())
        assert measure_loss(engine(model), token_ids).nats == pytest.approx(expected)

    def test_counts_what_is_copied(self) -> None:
        """A model that says the successor of its last token copies only runs."""
        successor = engine(lambda tokens: np.eye(VOCAB)[(tokens[-1] + 1) % VOCAB])
        assert count_copied(successor, [1, 2, 3], [4, 5, 9, 10]) == 3
