"""The figures of llama-perplexity, by hand and by their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.lab.disagreement.statistics import Divergence, diverge, log_probs, summarize

ROWS = np.random.default_rng(1).normal(size=(2, 40)).astype(np.float32) * 3


class TestDiverge:
    def test_by_hand(self) -> None:
        base, row = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
        found = diverge(base.astype(np.float32), row.astype(np.float32), 1)
        assert found.base_nll == pytest.approx(math.log(4), rel=1e-6)
        assert found.nll == pytest.approx(math.log(2), rel=1e-6)
        assert found.kld == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5), rel=1e-5)
        assert not found.same_top

    def test_a_model_is_no_distance_from_itself(self) -> None:
        found = diverge(ROWS[0], ROWS[0] + 7, 3)
        assert found.kld == pytest.approx(0.0, abs=1e-6)
        assert found.nll == pytest.approx(found.base_nll, rel=1e-5)
        assert found.same_top

    def test_leaves_out_tokens_that_only_one_has(self) -> None:
        padded = np.concatenate((ROWS[1], np.full(5, 50, dtype=np.float32)))
        assert diverge(ROWS[0], padded, 3) == diverge(ROWS[0], ROWS[1], 3)

    def test_leaves_out_what_the_base_model_hardly_ever_says(self) -> None:
        base = np.array([0, -20], dtype=np.float32)
        row = np.array([0, -1000], dtype=np.float32)
        assert diverge(base, row, 0).kld == pytest.approx(0.0, abs=1e-8)


class TestSummarize:
    def test_by_their_definitions(self) -> None:
        rng = np.random.default_rng(2)
        rows = rng.normal(size=(2, 300, 12)).astype(np.float32) * 2
        token_ids = rng.integers(12, size=300)
        found = summarize([diverge(base, row, int(i)) for base, row, i in zip(*rows, token_ids, strict=True)])
        base, other = (np.array([log_probs(row) for row in each]) for each in rows)
        base_nll, nll = (-each[np.arange(300), token_ids] for each in (base, other))
        kld = (np.exp(base) * (base - other)).sum(axis=1)
        assert found.tokens == 300
        assert found.ppl.value == pytest.approx(math.exp(nll.mean()))
        assert found.ppl.error == pytest.approx(math.exp(nll.mean()) * nll.std() / math.sqrt(299))
        assert found.base_ppl.value == pytest.approx(math.exp(base_nll.mean()))
        assert found.correlation == pytest.approx(np.corrcoef(nll, base_nll)[0, 1])
        assert found.ln_ratio.value == pytest.approx((nll - base_nll).mean())
        assert found.ln_ratio.error == pytest.approx((nll - base_nll).std() / math.sqrt(299))
        assert found.kld.value == pytest.approx(kld.mean())
        assert found.kld_percentiles[50] == pytest.approx(np.median(kld))
        delta_p = np.exp(-nll) - np.exp(-base_nll)
        assert found.rms_delta_p.value == pytest.approx(math.sqrt((delta_p**2).mean()))
        assert found.delta_p_percentiles[75] == pytest.approx(np.quantile(delta_p, 0.75))
        assert found.same_top.value == pytest.approx((base.argmax(axis=1) == other.argmax(axis=1)).mean())

    def test_a_model_and_itself(self) -> None:
        found = summarize([Divergence(nll, nll, 0.0, True) for nll in (0.5, 1.0, 2.0)] * 5)
        assert found.ratio.value == 1.0
        assert found.ratio.error == pytest.approx(0.0, abs=1e-7)
        assert found.correlation == pytest.approx(1.0)
        assert found.rms_delta_p == (0.0, 0.0)

    def test_few_tokens_have_no_errors(self) -> None:
        found = summarize([Divergence(0.5, 1.0, 0.3, False)])
        assert found.kld == (0.3, 0.0)
        assert found.correlation is None
        assert found.to_json()["kld"] == {"value": 0.3, "error": 0.0}
