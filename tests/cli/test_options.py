"""How the table of options becomes parameters of a command, and these its dataclasses."""

from __future__ import annotations

import re
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import OF_THE_DRAFT_MODEL, GivenOptions, ModelFlags, in_flags, is_given, with_options
from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.core.params import (
    LLAMA_CPP_ORDER,
    MAX_TOKENS,
    TRANSFORMERS_ORDER,
    SamplingParams,
    SpeculationParams,
    StopRules,
)
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.environment import ModelChoice
from paceline.models.hub.reference import HubModel
from paceline.planning.policies.fixed import FixedPolicy

Given = tuple[ModelChoice, SamplingParams, StopRules, SpeculationParams, FixedPolicy, bool]


def called(*arguments: str) -> Given:
    """Call a command that has every option of the table; return what it gets."""
    got: list[Given] = []
    app = typer.Typer()

    @with_options(together=(("seed", "mine"),))
    def command(
        context: typer.Context,
        *,
        models: Annotated[ModelChoice, ModelFlags(also=("override_tensors", "max_sequences", "verbose"))],
        params: SamplingParams,
        rules: StopRules,
        speculation: SpeculationParams,
        fixed: FixedPolicy,
        mine: Annotated[bool, typer.Option("--mine")] = False,
    ) -> None:
        """Take it all."""
        assert is_given(context, "mine") is mine
        got.append((models, params, rules, speculation, fixed, mine))

    app.command()(command)
    outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return got[0]


def test_nothing_given_is_the_default_of_all_options() -> None:
    models, params, rules, speculation, fixed, mine = called()
    assert models == ModelChoice(None, ModelOptions(""), False, DraftOptions())
    assert params == SamplingParams(seed=params.seed)
    assert (rules, speculation, fixed, mine) == (StopRules(), SpeculationParams(), FixedPolicy(), False)
    assert len({called()[1].seed for _ in range(5)}) > 1


def test_every_option_reaches_its_field() -> None:
    models, params, rules, speculation, fixed, mine = called(
        *("-m", "big", "-md", "small", "--engine", "llama_cpp", "-c", "512", "-cd", "0", "-ngl", "3", "-ngld", "2"),
        *("-dev", "GPU0, GPU1", "-devd", "none", "-ot", "a=B,exps=CPU", "-ot", "c=D", "-t", "1", "-tb", "2"),
        *("-td", "3", "-tbd", "4", "-fa", "off", "--exact", "-np", "5", "--dtype", "float16", "-v"),
        *("--temp", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1", "--repeat-penalty", "1.5"),
        *("--presence-penalty", "0.25", "--frequency-penalty", "0.75", "--repeat-last-n", "-1"),
        *("--logit-bias", "3=-inf", "--logit-bias", "4=1.5", "--sampler-order", "transformers", "-s", "9"),
        *("-n", "10", "--stop", "a,b", "--stop", "c", "--ignore-eos", "--drafters", "suffix, draft"),
        *("--verify", "rejection", "--no-speculation", "--draft-max", "6", "--draft-min", "2"),
        *("--draft-p-min", "0.5", "--draft-siblings", "3", "--mine"),
    )
    assert models.target == "big"
    assert models.settings == ModelOptions(
        "",
        engine="llama_cpp",
        context_length=512,
        gpu_layers=3,
        devices=("GPU0", "GPU1"),
        override_tensors=(("a", "B"), ("exps", "CPU"), ("c", "D")),
        threads=1,
        threads_batch=2,
        flash_attention=False,
        exact=True,
        max_sequences=5,
        dtype="float16",
        verbose=True,
    )
    assert models.draft == DraftOptions("small", 0, 2, ("none",), 3, 4)
    assert params == SamplingParams(
        0.5, 7, 0.9, 0.1, 1.5, 0.25, 0.75, -1, {3: float("-inf"), 4: 1.5}, 9, order=TRANSFORMERS_ORDER
    )
    assert rules == StopRules(10, ("a,b", "c"), True)
    assert speculation == SpeculationParams(False, ("suffix", "draft"), None, "rejection")
    assert (fixed, mine) == (FixedPolicy(6, 2, 0.5, 3), True)


def test_the_rarer_samplers_have_the_flags_of_llama_cpp() -> None:
    params = called(
        *("--top-n-sigma", "1.5", "--typical", "0.9", "--dynatemp-range", "0.5", "--dynatemp-exp", "2"),
        *("--dry-multiplier", "0.8", "--dry-base", "1.5", "--dry-allowed-length", "3", "--dry-penalty-last-n", "-1"),
        *("--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", "a\\\\b", "--xtc-probability", "0.5"),
        *("--xtc-threshold", "0.2", "-s", "9"),
    )[1]
    assert params == SamplingParams(
        seed=9,
        top_n_sigma=1.5,
        typical_p=0.9,
        dynatemp_range=0.5,
        dynatemp_exponent=2.0,
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=3,
        dry_penalty_last_n=-1,
        dry_sequence_breakers=("\n", "a\\b"),
        xtc_probability=0.5,
        xtc_threshold=0.2,
    )
    assert called("--dry-sequence-breaker", "x", "--dry-sequence-breaker", "none")[1].dry_sequence_breakers == ()


@pytest.mark.parametrize(
    ("words", "order"),
    [
        (["--samplers", "top_k;Min-P;temp"], ("logit_bias", "top_k", "min_p", "temperature")),
        (["--samplers", "typ_p;"], ("logit_bias", "typical_p")),
        (["--sampling-seq", "edskypmxt"], LLAMA_CPP_ORDER),
        (["--sampler-seq", "kpiat"], ("logit_bias", "top_k", "top_p", "infill", "temperature")),
        (["--sampler-order", "llama.cpp"], LLAMA_CPP_ORDER),
    ],
)
def test_samplers_are_ordered_by_llama_cpps_names_and_letters(words: list[str], order: tuple[str, ...]) -> None:
    params = called(*words, "--min-p", "0.3", "--top-p", "0.5", "--temp", "0.2")[1]
    assert params.order == order
    assert (params.min_p, params.top_p) == (0.3 if "min_p" in order else 0.0, 0.5 if "top_p" in order else 1.0)
    assert params.temperature == (0.2 if "temperature" in order else 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("magic", "unknown sampling step 'magic': choose from penalties, dry,"),
        ("top_k;top-k", "the sampling step top_k is named twice"),
        ("temp", "temp is a name and letters too: write temperature, or temperature;penalties;min_p;top_p"),
    ],
)
def test_an_order_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        called("--samplers", text)


def test_numbers_that_stand_for_others() -> None:
    models, params, rules, *_ = called("-c", "0", "-s", "-1", "-n", "-1")
    assert (models.whole_context, models.settings.context_length) == (True, None)
    assert rules.max_tokens == MAX_TOKENS
    assert 0 <= params.seed < 2**32
    assert called("-s", "-5")[1].seed == 2**32 - 5


@pytest.mark.parametrize(("seed", "is_given"), [("3", True), ("-5", True), ("-1", False)])
def test_a_seed_that_is_to_be_drawn_is_none_that_is_given(
    monkeypatch: pytest.MonkeyPatch, seed: str, *, is_given: bool
) -> None:
    got: list[frozenset[str]] = []
    app = typer.Typer()

    @with_options()
    def command(context: typer.Context, *, params: SamplingParams, given: GivenOptions) -> None:
        """Say what is given."""
        del context, params
        got.append(frozenset(given.values))

    app.command()(command)
    # What the command line says comes before the environment.
    monkeypatch.setenv("PACELINE_SEED", "9")
    assert CliRunner().invoke(app, ["-s", seed], catch_exceptions=False).exit_code == 0
    monkeypatch.setenv("PACELINE_SEED", seed)
    assert CliRunner().invoke(app, [], catch_exceptions=False).exit_code == 0
    assert ["seed" in names for names in got] == [is_given] * 2


def test_the_environment_stands_in_for_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "TEMPERATURE": "0.5",
        "TOP_K": "7",
        "SEED": "3",
        "STOP": "x",
        "DRAFT_MAX": "2",
        "MODEL": "big",
        "THREADS": "4",
        "DRAFT_THREADS": "2",
        "EXACT": "on",
    }.items():
        monkeypatch.setenv(f"PACELINE_{name}", text)
    models, params, rules, speculation, fixed, _ = called("--temp", "0", "-t", "1", "-s", "9")
    assert params == SamplingParams(0.0, top_k=7, seed=9)
    assert (rules.stop, speculation.draft_max, fixed) == (("x",), 2, FixedPolicy())
    assert (models.target, models.settings) == ("big", ModelOptions("", threads=1, exact=True))
    assert models.draft == DraftOptions(threads=2)
    monkeypatch.setenv("PACELINE_TOP_K", "many")
    with pytest.raises(InputError, match=r"^PACELINE_TOP_K is 'many': give a whole number, or unset it$"):
        called()


def test_models_of_the_hub_and_which_of_two_names_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    models = called("-hf", "u/m", "-hff", "a.gguf", "-hfd", "u/d:Q8_0", "--offline", "-hft", "hf_x", "-td", "3")[0]
    assert models.target == HubModel("u/m", file="a.gguf", token="hf_x", offline=True)
    assert (models.named_draft, models.draft) == (
        HubModel("u/d", "Q8_0", token="hf_x", offline=True),
        DraftOptions(threads=3),
    )
    assert called("--hf-repo", "u/m", "--spec-draft-hf", "u/d")[0] == called("-hfr", "u/m", "-hfrd", "u/d")[0]
    monkeypatch.setenv("PACELINE_MODEL", "big")
    monkeypatch.setenv("PACELINE_DRAFT_MODEL", "small")
    assert called("-hf", "u/m")[0].target == HubModel("u/m")
    assert called("-hf", "u/m")[0].named_draft == "small"
    assert called("-hfd", "u/d")[0].named_draft == HubModel("u/d")
    monkeypatch.delenv("PACELINE_MODEL")
    monkeypatch.delenv("PACELINE_DRAFT_MODEL")
    for name, text in (("HF_REPO", "u/env"), ("HF_FILE", "b.gguf"), ("DRAFT_HF_REPO", "u/small"), ("OFFLINE", "on")):
        monkeypatch.setenv(f"PACELINE_{name}", text)
    models = called()[0]
    assert models.target == HubModel("u/env", file="b.gguf", offline=True)
    assert models.named_draft == HubModel("u/small", offline=True)
    assert called("-hf", "u/m:Q8_0")[0].target == HubModel("u/m", "Q8_0", offline=True)
    assert (called("-m", "big")[0].target, called("-md", "x")[0].named_draft) == ("big", "x")
    monkeypatch.setenv("PACELINE_MODEL", "big")
    for arguments, words in (
        ((), "-m and -hf both name the target"),
        (("-m", "a", "-hf", "u/m"), "-m and -hf both name the target"),
        (("-m", "a", "-md", "b", "-hfd", "u/m"), "-md and -hfd both name the draft model"),
        (("-m", "a", "-hff", "x.gguf"), "-hff has no effect without -hf"),
        (("-hf", "m"), "is not a model of the hub"),
    ):
        with pytest.raises(InputError, match=words):
            called(*arguments)
    monkeypatch.delenv("PACELINE_DRAFT_HF_REPO")
    with pytest.raises(InputError, match="-hft has no effect without -hf or -hfd"):
        called("-m", "a", "-hft", "hf_x")


def test_a_command_hears_only_of_the_models_options_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a server's many requests would be taken from a single one."""
    monkeypatch.setenv("PACELINE_MAX_SEQUENCES", "16")
    monkeypatch.setenv("PACELINE_CONTEXT_LENGTH", "128")
    got: list[ModelChoice] = []
    app = typer.Typer()

    @with_options()
    def command(context: typer.Context, *, models: ModelChoice) -> None:
        """Take the models."""
        got.append(models)

    app.command()(command)
    assert CliRunner().invoke(app, [], catch_exceptions=False).exit_code == 0
    assert got[0].settings == ModelOptions("", context_length=128)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "-5"], r"^-5 tokens to predict: the least is 1 \(-n"),
        (["-cd", "1"], "^-cd 1: the least is 2"),
        (["-np", "0"], r"^0 sequences: the least is 1 \(-np\)"),
        (["--drafters", ","], "^no drafter is named"),
        (["-dev", "\udcff"], "^-dev is not UTF-8: byte 0 is 0xff"),
        (["--draft-siblings", "17"], r"^17 draft siblings are out of range: give a value from 1 to 16 \(--draft-sib"),
    ],
)
def test_values_are_checked_before_the_command_begins(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        called(*arguments)
    assert re.search(words, in_flags(str(caught.value)))


def test_flags_are_of_one_option_each() -> None:
    parts = (SamplingParams, StopRules, SpeculationParams, ModelOptions, DraftOptions, FixedPolicy)
    flags = [flag for part in parts for field in fields_of(part) for flag in field.flags]
    assert len(set(flags)) == len(flags)


def test_what_is_of_the_draft_model_can_be_refused_by_name() -> None:
    assert set(OF_THE_DRAFT_MODEL) == {
        *("draft_context_length", "draft_gpu_layers", "draft_devices", "draft_threads", "draft_threads_batch"),
        *("draft_vocab", "draft_token_map", "draft_cache_type_k", "draft_cache_type_v", "draft_rpc"),
    }


def test_a_command_can_learn_which_options_were_set(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[SamplingParams, frozenset[str]]] = []
    app = typer.Typer()

    @app.command()
    @with_options()
    def command(context: typer.Context, *, params: SamplingParams, given: GivenOptions, rules: StopRules) -> None:
        """Take some of it."""
        got.append((params, frozenset(given.values)))

    def called_with(*arguments: str) -> tuple[SamplingParams, frozenset[str]]:
        outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return got.pop()

    assert called_with()[1] == frozenset()
    # What is given counts as set, also where it is the default.
    monkeypatch.setenv("PACELINE_TOP_P", "0.5")
    params, names = called_with("--temp", "0.8", "-n", "3")
    assert (params.temperature, params.top_p) == (0.8, 0.5)
    assert names == {"temperature", "top_p", "max_tokens"}
    # Also what no flag sets.
    monkeypatch.setenv("PACELINE_CACHE_PROMPT", "false")
    assert called_with()[1] == {"top_p", "cache_prompt"}
