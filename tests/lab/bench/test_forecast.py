from __future__ import annotations

from typing import Any

import pytest

from paceline.lab.bench.forecast import QUICK_WORKLOADS, Forecast, explain_left_out, fit_settings
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.workloads import WORKLOAD_NAMES, WORKLOADS
from paceline.lab.variants import SERVER_DRAFT_VARIANTS, SERVER_NGRAM_VARIANTS
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
    chosen = fit_settings(wanted, profile(pass_s), 4096, 120.0)
    assert Forecast(chosen, profile(pass_s), 4096).total_s <= 120.0
    assert chosen.laps == wanted.laps
    assert list(chosen.workloads) == list(wanted.workloads)[: len(chosen.workloads)]


def test_a_fast_model_is_measured_in_full_and_a_slow_one_in_part() -> None:
    wanted = settings(workloads=("new-code", "structured-forced", "hard"), num_static=1, coarse=True)
    fast, slow = (fit_settings(wanted, profile(pass_s), 4096, 120.0) for pass_s in (0.0001, 0.03))
    assert len(fast.workloads) == 3
    assert (len(slow.workloads), slow.tokens) < (len(fast.workloads), fast.tokens)


def test_what_the_user_set_stays() -> None:
    wanted = settings(tokens=200, prompts=4)
    chosen = fit_settings(wanted, profile(0.5), 4096, 1.0, given={"workloads", "tokens", "prompts"})
    assert (tuple(chosen.workloads), chosen.tokens, chosen.prompts) == (WORKLOAD_NAMES, 200, 4)
    smallest = fit_settings(wanted, profile(0.5), 4096, 1.0, given={"workloads"})
    assert (list(smallest.workloads), smallest.tokens, smallest.prompts) == (list(WORKLOAD_NAMES), 16, 1)
    kept = fit_settings(
        settings(variants=("static", "auto"), laps=4), profile(5.0), 4096, 1.0, given={"variants", "laps"}
    )
    assert (tuple(kept.variants), kept.laps) == (("static", "auto"), 4)


def quick() -> BenchSettings:
    return settings(
        workloads=QUICK_WORKLOADS, variants=("static", "auto"), num_static=1, coarse=True, laps=3, prompts=3
    )


@pytest.mark.parametrize("pass_s", [0.06, 0.2, 1.0])
def test_two_minutes_hold_a_pair_however_slow_the_machine_is(pass_s: float) -> None:
    chosen = fit_settings(quick(), profile(pass_s), 4096, 120.0)
    assert Forecast(chosen, profile(pass_s), 4096).total_s <= 120.0
    # The one workload that is left cannot loop.
    assert any(WORKLOADS[name].forced for name in chosen.workloads)
    assert "auto" in chosen.variants


def test_of_what_a_slow_machine_leaves_out_the_least_missed_goes_first() -> None:
    cut = [fit_settings(quick(), profile(pass_s), 4096, 120.0) for pass_s in (0.03, 0.06, 0.2, 0.5, 1.0, 5.0)]
    sizes = [
        (len(each.workloads), len(each.variants), each.laps, each.with_plain, each.tokens, each.prompts) for each in cut
    ]
    assert sizes == sorted(sizes, reverse=True)
    least = cut[-1]
    assert (list(least.workloads), list(least.variants)) == (["structured-forced"], ["auto"])
    assert (least.laps, least.tokens, least.prompts, least.prompt_tokens, least.depth) == (1, 16, 1, 16, 4)
    assert not least.with_plain


def test_what_was_left_out_is_said_with_a_limit_that_holds_it() -> None:
    costs = profile(1.0)
    wanted, chosen = quick(), fit_settings(quick(), costs, 4096, 120.0)
    words = explain_left_out(wanted, chosen, costs, 4096, 120.0)
    assert words is not None
    assert words.startswith(
        "to fit 120 s: 1 of 4 workloads (without new-code, hard, editing-forced), answers of 16 tokens instead of 256, "
        "prompts of 16 tokens instead of 128, 1 prompt of each instead of 3, 1 lap instead of 3, "
    )
    assert "no static, no plain against plain; --time-limit " in words
    later = explain_left_out(wanted, chosen, costs, 4096, 111.0, 9.2)
    assert later is not None
    assert later.startswith("to fit 111 s, after 9 s of loading and measuring passes: 1 of 4 workloads")
    enough = float(words.split("--time-limit ")[1].split()[0])
    assert explain_left_out(wanted, fit_settings(wanted, costs, 4096, enough), costs, 4096, enough) is None
    assert explain_left_out(wanted, wanted, costs, 4096, 120.0) is None


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
