"""Two models that read one text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from training.pair.logit_rows import count_copied, measure_loss, read_paired_rows

from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary
from tests.lab.doctor.helpers import VOCAB, engine, noisy_model, some_tokens


class TestReading:
    def test_pairs_rows_by_token(self) -> None:
        target, draft, token_ids = noisy_model(1), noisy_model(2), some_tokens(100)
        paired = list(read_paired_rows(engine(target), engine(draft, max_rows=9), token_ids, 40))
        assert [index for index, _, _ in paired] == list(range(40, 100))
        assert all(np.array_equal(row, target(token_ids[:index])) for index, row, _ in paired)
        assert all(np.array_equal(row, draft(token_ids[:index])) for index, _, row in paired)

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
