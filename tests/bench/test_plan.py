from __future__ import annotations

from typing import Any

import pytest

from paceline.bench.plan import Forecast, fitted
from paceline.bench.settings import BenchSettings
from paceline.bench.variants import SERVER_DRAFT_VARIANTS, SERVER_NGRAM_VARIANTS
from paceline.bench.workloads import WORKLOAD_NAMES, WORKLOADS
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost


def profile(pass_s: float) -> CostProfile:
    """Return a model's costs, as of 1B parameters for 30 ms: a token read takes a quarter of one written."""
    target = PassCost((WidthCost.of(1, [pass_s]), WidthCost.of(64, [16 * pass_s])))
    return CostProfile(target, PassCost((WidthCost.of(1, [0.001]),)))


def settings(**changes: Any) -> BenchSettings:
    values: dict[str, Any] = {"workloads": WORKLOAD_NAMES, "variants": ("static",), "drafters": ("draft", "suffix")}
    return BenchSettings(**{**values, **changes})


def test_a_run_is_its_prompt_and_its_answer() -> None:
    forecast = Forecast(settings(), profile(0.03), 4096)
    assert forecast.run_s("new-code") == pytest.approx(128 * 0.03 / 4 + 256 * 0.03)
    assert forecast.run_s("long-prompt") == pytest.approx(4032 * 0.03 / 4 + 64 * 0.03)
    assert forecast.run_s("mixed") == pytest.approx(sum(forecast.run_s(name) for name in WORKLOADS))
    # Plain, three static settings: each between two plain runs that it shares with its neighbours, and all of them
    # after a prompt that is read once.
    assert forecast.num_variants("new-code") == 4
    assert forecast.lap_s("hard") == pytest.approx(128 * 0.03 / 4 + 9 * 256 * 0.03)


@pytest.mark.parametrize("pass_s", [0.001, 0.03])
def test_what_fits_a_limit_is_forecast_to_fit_it(pass_s: float) -> None:
    wanted = settings(workloads=("new-code", "structured-forced", "hard"), num_static=1, coarse=True)
    chosen = fitted(wanted, profile(pass_s), 4096, 120.0)
    assert Forecast(chosen, profile(pass_s), 4096).total_s <= 120.0
    assert chosen.laps == wanted.laps
    assert list(chosen.workloads) == list(wanted.workloads)[: len(chosen.workloads)]


def test_a_fast_model_is_measured_in_full_and_a_slow_one_in_part() -> None:
    wanted = settings(workloads=("new-code", "structured-forced", "hard"), num_static=1, coarse=True)
    fast, slow = (fitted(wanted, profile(pass_s), 4096, 120.0) for pass_s in (0.0001, 0.03))
    assert len(fast.workloads) == 3
    assert (len(slow.workloads), slow.tokens) < (len(fast.workloads), fast.tokens)


def test_what_the_user_set_stays() -> None:
    wanted = settings(tokens=200, prompts=4)
    chosen = fitted(wanted, profile(0.5), 4096, 1.0, given={"workloads", "tokens", "prompts"})
    assert (tuple(chosen.workloads), chosen.tokens, chosen.prompts) == (WORKLOAD_NAMES, 200, 4)
    smallest = fitted(wanted, profile(0.5), 4096, 1.0, given={"workloads"})
    assert (list(smallest.workloads), smallest.tokens, smallest.prompts) == (list(WORKLOAD_NAMES), 32, 2)


def test_another_server_takes_its_time_where_it_can_run() -> None:
    alone, beside = (Forecast(settings(with_server=asked), profile(0.03), 4096) for asked in (False, True))
    # Plain, and the best with n-grams, with the draft model and with both.
    assert beside.num_variants("new-code") == alone.num_variants("new-code") + 4
    # Each of them reads the prompt, and answers between the plain runs.
    longer_s = 4 * alone.prompt_s("new-code") + 8 * alone.answer_s("new-code")
    assert beside.lap_s("new-code") - alone.lap_s("new-code") == pytest.approx(longer_s)
    tries = len(SERVER_NGRAM_VARIANTS) + len(SERVER_DRAFT_VARIANTS)
    assert beside.prepare_s("new-code") - alone.prepare_s("new-code") == pytest.approx(tries * alone.run_s("new-code"))
    for name in ("mixed", "editing-forced"):
        assert beside.num_variants(name) == alone.num_variants(name)
        assert beside.prepare_s(name) == alone.prepare_s(name)
