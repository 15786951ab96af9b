"""The Python API: load, generate, stream, close."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.chat.params import ChatParams
from paceline.core.arrays import Float64Array
from paceline.drafters.draft_model import ModelDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.engines.sequence_pool import SequencePool
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from paceline.planning.auto.policy import AutoPolicy
from tests.models.helpers import edited_gguf, with_last_tokens
from tests.planning.helpers import allow_drafts
from tests.tiers import some_long

ENDLESS = 10**9
"""Tokens of an answer that nobody waits for the end of."""


def scripted_model(
    max_sequences: int = 4,
    policy: paceline.Policy = paceline.NO_SPECULATION,
    *,
    keeps: bool = False,
    **options: Any,
) -> paceline.Model:
    """A model of 40 tokens; with ``keeps`` it keeps what it has read."""
    model, vocabulary = random_model(40, seed=3, order=2), ScriptedVocabulary.of_size(40)
    engine = ScriptedEngine(model, vocabulary, max_sequences=max_sequences, context_length=2 * ENDLESS)
    return paceline.Model(engine, [], policy, pool=SequencePool(engine) if keeps else None, **options)


def test_generate_is_what_stream_gives() -> None:
    with paceline.load() as model:
        whole = model.generate("def f(x):", max_tokens=20, temperature=0.8, seed=5)
        pieces = [segment.text for segment in model.stream("def f(x):", max_tokens=20, temperature=0.8, seed=5)]
        assert "".join(pieces) == whole.text
        assert len(whole.token_ids) == len(whole.sources) == 20
        assert whole.finish_reason == "length"
        assert whole.seed == 5
        spelled = b"".join(model.target.vocabulary.token_bytes(token_id) for token_id in whole.token_ids)
        assert spelled.decode(errors="replace") == whole.text


def test_reasoning_ends_where_its_budget_is_spent() -> None:
    """With a draft model and without. The end of text stands for a marker that is a control token."""
    with paceline.load(draft=embedded_draft(), policy=paceline.FixedPolicy(4)) as model:
        vocabulary = model.target.vocabulary
        (end,) = sorted(vocabulary.end_ids)[:1]
        marker = (end, *vocabulary.tokenize(" so", add_special=False))
        asked = paceline.GenerateOptions(max_tokens=24, seed=3, ignore_end=True, preserved_ids=[end])
        free = model.generate("def f(x):", **asked)
        asked["reasoning_budget"] = paceline.ReasoningBudget(7, (), marker, begun=True)
        drafted = model.generate("def f(x):", **asked)
        asked["speculate"] = False
        plain = model.generate("def f(x):", **asked)
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
    assert drafted.token_ids[:7] == free.token_ids[:7]
    assert tuple(drafted.token_ids[7 : 7 + len(marker)]) == marker
    assert "draft" in drafted.sources[7 : 7 + len(marker)], "the draft model is told, too"
    assert (vocabulary.token_spelling(end) or b"").decode() + " so" in drafted.text


@pytest.fixture
def reasoning_model(tmp_path: Path) -> Iterator[tuple[paceline.Model, ChatParams]]:
    """A model whose markers of reasoning are control tokens, and a template that opens it, with a budget of 4."""
    path = with_last_tokens(tmp_path / "reasons.gguf", ["<think>", "</think>"])
    template = tmp_path / "template.jinja"
    template.write_text("{% for one in messages %}{{ one.content }}\n{% endfor %}<think>\n{# </think> #}")
    with paceline.load(path, policy=paceline.NO_SPECULATION) as model:
        yield model, ChatParams(template_file=template, reasoning_budget=4)


@pytest.mark.parametrize(
    "options", [{}, {"preserved_ids": None, "reasoning_budget": None}, {"preserved_ids": np.array([7])}]
)
def test_options_of_a_call_leave_a_conversation_what_its_reasoning_is_told_by(
    options: dict[str, Any], reasoning_model: tuple[paceline.Model, ChatParams]
) -> None:
    model, params = reasoning_model
    reply = model.chat("def f(x):", chat=params, max_tokens=16, temperature=0, **options)
    vocabulary = model.target.vocabulary
    assert vocabulary.token_spelling(reply.generation.token_ids[4]) == b"</think>"
    assert reply.reasoning
    assert reply.text
    assert set(reply.prompt.options["preserved_ids"] or ()) <= vocabulary.control_ids


def test_a_dropped_stream_gives_its_place_back() -> None:
    with scripted_model(max_sequences=1) as model:
        for _ in model.stream([1], max_tokens=ENDLESS, ignore_end=True):
            break
        assert model.generate([1], max_tokens=3, ignore_end=True).finish_reason == "length"


def failing_model(error: BaseException) -> paceline.Model:
    """A model that raises when it has seen the token 7, and counts up."""

    def logits(tokens: Sequence[int]) -> Float64Array:
        if tokens[-1] == 7:
            raise error
        row: Float64Array = np.eye(10)[(tokens[-1] + 1) % 10]
        return row

    engine = ScriptedEngine(logits, ScriptedVocabulary.of_size(10), max_sequences=2)
    return paceline.Model(engine, [], paceline.NO_SPECULATION)


def test_an_interrupted_call_leaves_the_model_usable() -> None:
    with failing_model(KeyboardInterrupt()) as model:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                model.generate([5], max_tokens=9, temperature=0.0)
        assert model.generate([0], max_tokens=3, temperature=0.0).token_ids == [1, 2, 3]


def test_an_error_ends_its_own_request_only() -> None:
    with failing_model(paceline.EngineError("seven")) as model:
        other = model.stream([8], max_tokens=5, temperature=0.0)
        with pytest.raises(paceline.EngineError, match="seven"):
            model.generate([5], max_tokens=9, temperature=0.0)
        assert other.result().token_ids == [9, 0, 1, 2, 3]
        assert model.generate([0], max_tokens=3, temperature=0.0).token_ids == [1, 2, 3]


@pytest.mark.parametrize("greedy", [True, False])
def test_rows_that_are_not_numbers_are_the_models_fault(greedy: bool) -> None:
    engine = ScriptedEngine(lambda tokens: np.full(10, np.nan), ScriptedVocabulary.of_size(10))
    model = paceline.Model(engine, [], paceline.NO_SPECULATION)
    with model, pytest.raises(paceline.EngineError, match="largest logit is nan"):
        model.generate([1], temperature=0.0 if greedy else 0.8)


def test_a_seed_is_made_up_and_told() -> None:
    with scripted_model() as model:
        # Past the end token: texts that end at once would be equal for one pair of seeds in a thousand.
        first = model.generate([1], max_tokens=30, temperature=1.5, ignore_end=True)
        again = model.generate([1], max_tokens=30, temperature=1.5, seed=first.seed, ignore_end=True)
        other = model.generate([1], max_tokens=30, temperature=1.5, seed=first.seed + 1, ignore_end=True)
        assert again.token_ids == first.token_ids
        assert other.token_ids != first.token_ids


def test_leaving_a_stream_early_frees_its_place() -> None:
    with scripted_model(max_sequences=1) as model:
        with model.stream([1], max_tokens=ENDLESS, temperature=0.0, ignore_end=True) as stream:
            first = next(iter(stream)).text
        left = stream.so_far()
        assert left.finish_reason == "cancelled"
        assert left.text.startswith(first)
        assert len(left.token_ids) == left.stats.predicted_tokens
        assert stream.result() == left
        assert model.generate([1], max_tokens=3, ignore_end=True).finish_reason == "length"


@pytest.mark.parametrize("post_sampling", [False, True])
def test_logprobs_are_the_targets_with_drafts_and_without(post_sampling: bool) -> None:
    asked = paceline.GenerateOptions(
        max_tokens=24, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3, logprobs=3, ignore_end=True
    )
    asked["post_sampling_probs"] = post_sampling
    with paceline.load(draft=embedded_draft(), policy=paceline.FixedPolicy(4, siblings=2)) as model:
        drafted = model.generate("def f(x):", **asked)
        asked["speculate"] = False
        plain = model.generate("def f(x):", **asked)
        # A probability of the tempered distribution changes faster than its logits do.
        tolerance = 2 * model.target.capabilities.logit_tolerance / 0.8
    assert drafted.token_ids == plain.token_ids == [one.token_id for one in drafted.logprobs]
    assert {"draft", "target"} <= set(drafted.sources)
    assert len({one.logprob for one in drafted.logprobs}) > 10
    for one, other in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=tolerance)
        assert len(one.top) == 3
        assert max(one.logprob, one.top[1][1]) <= one.top[0][1] <= 0.0


def test_each_of_several_choices_has_its_own_logprobs() -> None:
    with scripted_model() as model:
        asked = paceline.GenerateOptions(max_tokens=12, temperature=1.5, seed=5, logprobs=2)
        choices = model.choices([1, 2], 3, **asked)
        assert len({choice.logprobs for choice in choices}) == 3
        for index, choice in enumerate(choices):
            assert [one.token_id for one in choice.logprobs] == choice.token_ids
            asked["choice"] = index
            assert choice.logprobs == model.generate([1, 2], **asked).logprobs
        assert model.generate([1, 2], max_tokens=2).logprobs == ()


def test_logprobs_of_an_answer_that_is_left_early_and_of_one_in_an_event_loop() -> None:
    with scripted_model() as model:
        asked = paceline.GenerateOptions(max_tokens=ENDLESS, temperature=0.9, seed=2, ignore_end=True, logprobs=1)
        with model.stream([1], **asked) as stream:
            next(iter(stream))
            assert stream.so_far().logprobs
        left = stream.result()
        assert [one.token_id for one in left.logprobs] == left.token_ids
        asked["max_tokens"] = 9
        others = asyncio.run(model.agenerate([1], **asked)).logprobs
        num_common = min(9, len(left.logprobs))
        assert (len(others), others[:num_common]) == (9, left.logprobs[:num_common])


def test_use_after_close_is_a_clear_error() -> None:
    model = scripted_model()
    stream = model.stream([1], max_tokens=ENDLESS, ignore_end=True)
    next(iter(stream))
    model.close()
    model.close()
    for call in (lambda: model.generate([1]), lambda: model.stream([1]), lambda: model.worker.call(lambda: None)):
        with pytest.raises(paceline.ClosedError):
            call()
    request = model.loop.add([1], paceline.SamplingParams(), paceline.StopRules())
    (emission,) = model.loop.step()
    assert (emission.request, emission.finish_reason) == (request, "error")
    assert isinstance(request.error, paceline.ClosedError)
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) == result.stats.predicted_tokens


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"tempratur": 1.0}, {"logit_bias": {1.5: 3.0}}])
def test_options_that_cannot_be_used_are_named(options: dict[str, Any]) -> None:
    with scripted_model() as model, pytest.raises(paceline.InputError) as caught:
        model.generate([1], **options)
    assert [caught.value.field] == [*options]


def test_numbers_of_numpy_and_none_for_the_default() -> None:
    with scripted_model() as model:
        plain = model.generate([1, 2], max_tokens=5, seed=3, logit_bias={4: 2.0}, ignore_end=True)
        options: dict[str, Any] = {
            "max_tokens": np.int64(5),
            "seed": np.int32(3),
            "logit_bias": {np.int64(4): np.float32(2.0)},
            "ignore_end": True,
            **dict.fromkeys(("temperature", "stop", "top_k", "speculate")),
        }
        answer = model.generate(np.array([[1, 2]]), **options)
        assert answer.token_ids == plain.token_ids
        assert type(answer.seed) is int


def test_a_context_of_0_is_refused_with_what_to_give_instead() -> None:
    for call in (
        lambda: paceline.load(embedded_target(), context_length=0),
        lambda: paceline.ModelOptions(embedded_target(), context_length=0),
    ):
        with pytest.raises(paceline.InputError, match="or None"):
            call()


def test_a_failed_load_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(paceline.ModelFileError, match=r"bad\.gguf"):
        paceline.load(embedded_target(), draft=tmp_path / "bad.gguf")
    refused: list[dict[str, Any]] = [
        {"draft": embedded_draft(), "policy": paceline.NO_SPECULATION},
        {"drafters": ["suffix"], "policy": paceline.NO_SPECULATION},
        {"verify": "trust"},
        {"prompt_cache_mib": -1},
        {"max_waiting": -1},
        {"max_waiting": "many"},
        {"policy": "fast"},
        {"drafters": ["oracle"]},
        {"target": paceline.ModelOptions(embedded_target()), "context_length": 5},
        {"target": paceline.ModelOptions(embedded_target()), "model_defaults": False},
        {"target": paceline.ModelOptions(embedded_target()), "threads": 1},
        {"model_defaults": "no"},
        {"threads": 0},
        {"thread": 1},
        {"dtype": "float33"},
    ]
    for options in refused:
        with pytest.raises(paceline.InputError):
            paceline.load(**options)


def test_how_a_model_runs_is_said_by_name_and_its_draft_runs_alike() -> None:
    with paceline.load(
        embedded_target(), draft=embedded_draft(), context_length=256, max_sequences=2, threads=1, devices=["none"]
    ) as model:
        options = model.target_options
        assert options is not None
        assert (options.context_length, options.max_sequences, options.threads) == (256, 2, 1)
        assert options.devices == ("none",)
        (draft,) = [drafter for drafter in model.drafters if isinstance(drafter, ModelDrafter)]
        assert "1 threads" in draft.engine.description
    with pytest.raises(paceline.InputError, match=r"no option gpu_layer: did you mean gpu_layers\?") as refused:
        paceline.load(gpu_layer=3)  # type: ignore[call-arg]
    assert refused.value.field == "gpu_layer"


def test_tokens_of_a_text_and_back() -> None:
    with scripted_model() as model:
        text = model.detokenize([3, 5])
        assert text.encode() == b"".join(map(model.target.vocabulary.token_bytes, [3, 5]))
        assert model.tokenize(text) == [3, 5]


def test_what_one_holds_says_what_it_is_in_a_line() -> None:
    with scripted_model() as model:
        stream = model.stream([1, 2], max_tokens=5, ignore_end=True)
        answer = stream.result()
        for each, says in (
            (model, "drafts by nothing>"),
            (stream, "<Stream: 5 tokens, over>"),
            (answer, ": 5 tokens; "),
            (answer.stats, "<RequestStats: 5 tokens; "),
        ):
            assert says in repr(each)
            assert len(repr(each)) < 200
            assert "\n" not in repr(each)
    assert repr(model).endswith(", closed>")
    json.dumps(answer.stats.to_dict())


def test_the_engine_holds_every_branch_the_policy_may_ask_for() -> None:
    policy = paceline.FixedPolicy(draft_max=6, siblings=4)
    with paceline.load(drafters=["draft", "suffix"], policy=policy) as model:
        answer = model.generate("def f(x):", max_tokens=24, temperature=0.0, ignore_end=True)
        # A tree with too many branches would be refused by the engine, and every round would decode plainly.
        assert answer.stats.num_drafted > 4 * 6 * answer.stats.rounds // 2


def test_every_request_of_several_gets_its_branches_and_its_place_at_the_draft() -> None:
    options = paceline.ModelOptions(embedded_target(), max_sequences=3, context_length=256, threads=1)
    with paceline.load(options, draft=embedded_draft(), policy=paceline.FixedPolicy(4, siblings=2)) as model:
        streams = [model.stream("def f(x):", max_tokens=20, temperature=0.8, seed=seed) for seed in range(3)]
        for stream in streams:
            stats = stream.result().stats
            assert stats.num_drafted > 4 * stats.rounds


def test_a_request_may_bring_lengths_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_drafts(monkeypatch)
    options = paceline.ModelOptions(embedded_target(), max_sequences=3, context_length=256)
    asked = paceline.GenerateOptions(max_tokens=24, temperature=0.8, seed=1, ignore_end=True)
    fixed = paceline.GenerateOptions(policy="fixed", draft_max=8, **asked)
    sure_only = paceline.GenerateOptions(p_min=0.5, **fixed)
    planned = paceline.GenerateOptions(policy="auto", **asked)
    plainly = paceline.GenerateOptions(speculate=False, **asked)
    with paceline.load(options, draft=embedded_draft()) as model:
        plain = model.generate("def f(x):", **plainly)
        streams = [
            model.stream("def f(x):", **fixed),
            model.stream("def f(x):", **sure_only),
            model.stream("def f(x):", **planned),
        ]
        own, sure, auto = [stream.result() for stream in streams]
        for answer in (own, sure, auto):
            assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text)
        assert own.stats.drafted_by_source == {"draft": own.stats.num_drafted}
        assert own.stats.num_drafted > 4 * own.stats.rounds, "but for rounds that read prompts, and the last ones"
        assert own.stats.num_drafted > sure.stats.num_drafted > 0
        assert len(model.drafters) == 3
        with pytest.raises(paceline.SamplingError):
            model.generate("def f(x):", verify="rejection", draft_min=2, temperature=0.8)
    with paceline.load(options, draft=embedded_draft(), policy=paceline.FixedPolicy(2)) as model:
        answer = model.generate("def f(x):", **fixed)
        assert answer.text == plain.text
        assert answer.stats.num_drafted > 6 * answer.stats.rounds
        with pytest.raises(paceline.InputError, match="'auto'"):
            model.generate("def f(x):", policy="auto")
    with scripted_model() as model, pytest.raises(paceline.InputError, match="'fixed'"):
        model.generate([1], policy="fixed")


def learned_files(folder: Path) -> list[Path]:
    return sorted((folder / "learned").glob("*"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with what passes of the embedded pair cost, and nothing that was learned."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(folder))
        paceline.load(embedded_target(), draft=embedded_draft(), context_length=256).close()
    assert learned_files(folder) == [], "nothing was asked"
    return folder


@pytest.fixture
def cache(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(measured, tmp_path / "cache")
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    allow_drafts(monkeypatch)
    return folder


def answer_and_remembered(*, remember: bool = True) -> tuple[str, list[str]]:
    with paceline.load(embedded_target(), draft=embedded_draft(), context_length=256, remember=remember) as model:
        text = model.generate("def f(x):", max_tokens=40, temperature=0.8, seed=1, ignore_end=True).text
        assert isinstance(model.policy, AutoPolicy)
        return text, list(model.policy.report().remembered)


def test_what_was_learned_is_there_at_the_next_load(cache: Path) -> None:
    first, nothing = answer_and_remembered()
    (kept,) = learned_files(cache)
    assert nothing == []
    assert "def f" not in kept.read_text()
    again, remembered = answer_and_remembered()
    assert again == first
    # On a busy machine a process may find that the draft model does not pay before it has tried it, and learn nothing.
    assert "draft" in remembered or any("draft" in answer_and_remembered()[1] for _ in range(5))


def test_nothing_is_remembered_where_that_is_not_wanted(cache: Path) -> None:
    answer_and_remembered(remember=False)
    assert learned_files(cache) == []
    answer_and_remembered()
    (kept,) = learned_files(cache)
    before = kept.read_text()
    assert answer_and_remembered(remember=False)[1] == []
    assert kept.read_text() == before


@pytest.mark.parametrize(
    "spoiled", some_long(["", "{}", '{"key": {}, "data": {"version": 1}}', "[" * 100_000], quick=["{}"])
)
def test_what_was_learned_is_not_trusted_once_spoiled(cache: Path, spoiled: str) -> None:
    first, _ = answer_and_remembered()
    (kept,) = learned_files(cache)
    kept.write_text(spoiled)
    assert answer_and_remembered() == (first, [])
    assert any("draft" in answer_and_remembered()[1] for _ in range(5))


def test_a_cache_that_cannot_be_written_does_not_keep_a_model_from_closing(cache: Path) -> None:
    (cache / "learned").write_text("in the way")
    answer_and_remembered()
    assert (cache / "learned").read_text() == "in the way"


def test_choices_are_those_of_calls_by_themselves_and_read_their_prompt_once() -> None:
    prompt = [number % 40 for number in range(300)]
    with scripted_model(3, keeps=True) as model:
        answers = model.choices(prompt, 5, max_tokens=20, seed=7)
        alone = [
            model.generate(prompt, max_tokens=20, seed=7, choice=choice, cache_prompt=False) for choice in range(5)
        ]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert len({tuple(answer.token_ids) for answer in answers}) == 5
    assert [answer.stats.cached_tokens for answer in answers] == [0, 299, 299, 299, 299]
    assert sum(answer.stats.prompt_tokens for answer in answers) == 304


@pytest.mark.parametrize("seed", [None, -1])
def test_choices_have_one_seed_though_it_be_drawn(seed: int | None) -> None:
    with scripted_model(3, keeps=True) as model:
        drawn = [{answer.seed for answer in model.choices([1], 3, max_tokens=2, seed=seed)} for _ in range(2)]
    assert [len(seeds) for seeds in drawn] == [1, 1]
    assert drawn[0] != drawn[1]


def test_choices_that_cannot_be_had() -> None:
    with scripted_model() as model:
        with pytest.raises(paceline.InputError):
            model.choices([1], 0)
        with pytest.raises(paceline.InputError):
            model.choices([1], 3, choice=2)


def test_a_next_turn_starts_from_the_one_before() -> None:
    with paceline.load(policy=paceline.NO_SPECULATION) as model:
        first = model.generate("Once upon a time there was a fox. " * 8, max_tokens=30, seed=1, ignore_end=True)
        assert first.stats.cached_tokens == 0
        prompt = model.worker.call(lambda: model.target.vocabulary.tokenize("Once upon a time there was a fox. " * 8))
        turn = [*prompt, *first.token_ids, *prompt[1:9]]
        second = model.generate(turn, max_tokens=5, seed=1)
        # All but the last token of the first answer was in the cache.
        assert second.stats.cached_tokens == len(prompt) + 29
        assert second.stats.prompt_tokens == len(turn) - second.stats.cached_tokens
        other = model.generate(turn, max_tokens=5, seed=1, namespace="somebody else's")
        assert other.stats.cached_tokens == 0
        assert model.generate(turn, max_tokens=5, seed=1, cache_prompt=False).stats.cached_tokens == 0


def test_more_requests_wait_and_then_are_told_that_too_many_do() -> None:
    with scripted_model(1, max_waiting=2) as model:
        running = model.stream([1], max_tokens=4000)
        next(running.rounds())
        waiting = [model.stream([2], max_tokens=3) for _ in range(2)]
        with pytest.raises(paceline.QueueFullError):
            model.stream([3])
        running.close()
        assert [stream.result().finish_reason for stream in waiting] == ["length"] * 2


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that says how it is to be sampled."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return edited_gguf(path, {"general.sampling.temp": 0.3, "general.sampling.top_k": 5})


def test_what_a_model_says_about_sampling_stands_where_a_call_does_not_say_it(opinionated: Path) -> None:
    call: dict[str, Any] = {"max_tokens": 24, "seed": 5}
    with paceline.load(opinionated, policy=paceline.NO_SPECULATION) as model:
        assert model.defaults == SamplingDefaults({"temperature": 0.3, "top_k": 5}, "GGUF metadata")
        with pytest.raises(TypeError):
            model.defaults.values["top_k"] = 1  # type: ignore[index]
        stream = model.stream("def f(x):", **call)
        assert (stream.params.temperature, stream.params.top_k, stream.params.top_p) == (0.3, 5, 0.95)
        answer = stream.result()
        assert answer.model_defaults == {"temperature": 0.3, "top_k": 5}
        said = model.generate("def f(x):", **call, temperature=0.3, top_k=5)
        assert (said.text, said.model_defaults) == (answer.text, {})
        own = model.stream("def f(x):", **call, temperature=0.8, top_k=None)
        assert (own.params.temperature, own.params.top_k) == (0.8, 5)
        assert own.result().model_defaults == {"top_k": 5}
    with paceline.load(opinionated, policy=paceline.NO_SPECULATION, model_defaults=False) as model:
        assert model.defaults == NO_DEFAULTS
        assert model.stream("x", max_tokens=1).params.temperature == 0.8
        assert model.generate("def f(x):", **call, temperature=0.3, top_k=5).text == answer.text
    with paceline.load(
        paceline.ModelOptions(opinionated, model_defaults=False), policy=paceline.NO_SPECULATION
    ) as model:
        assert model.defaults == NO_DEFAULTS


def test_a_models_defaults_reach_answers_in_an_event_loop(opinionated: Path) -> None:
    with paceline.load(opinionated, policy=paceline.NO_SPECULATION) as model:
        answer = asyncio.run(model.agenerate("def f(x):", max_tokens=8, seed=1, top_k=3))
        assert answer.model_defaults == {"temperature": 0.3}


def test_a_seed_repeats_the_text_of_a_model_that_is_greedy_by_default() -> None:
    greedy = SamplingDefaults({"temperature": 0.0}, "somewhere")
    with scripted_model(verify="rejection", defaults=greedy) as model:
        assert model.repeats_text({})
        assert model.repeats_text({"temperature": None})
        assert not model.repeats_text({"temperature": 0.8})
        assert not model.repeats_text({"temperature": 0.0, "dynatemp_range": 0.5})
        assert model.generate([1], max_tokens=9).token_ids == model.generate([1], max_tokens=9).token_ids


def test_a_broken_default_does_not_keep_a_model_from_running(tmp_path: Path) -> None:
    path = edited_gguf(tmp_path / "model.gguf", {"general.sampling.temp": -1.0, "general.sampling.top_k": 1})
    with (
        pytest.warns(paceline.ModelWarning, match=r"sampling\.temp -1\.0, which is ignored"),
        paceline.load(path, policy=paceline.NO_SPECULATION) as model,
    ):
        assert model.generate("def f(x):", max_tokens=4).model_defaults == {"top_k": 1}


def test_a_prediction_is_drafted_and_counted() -> None:
    with scripted_model(policy=paceline.FixedPolicy(3)) as model:
        plain = model.generate([1, 2], max_tokens=24, seed=4)
        assert plain.stats.num_drafted == 0
        said = list(plain.token_ids)

        def counts(prediction: Any, **options: Any) -> tuple[int, int, int]:
            again = model.generate([1, 2], max_tokens=24, seed=4, prediction=prediction, **options)
            assert again.token_ids == plain.token_ids
            assert again.sources.count("prediction") == again.stats.accepted_by_source["prediction"]
            drafted, accepted = again.stats.drafted_by_source, again.stats.accepted_by_source
            return drafted["prediction"], accepted["prediction"], again.stats.rounds

        # A token with the prompt, five rounds of three and the target's own, two and the last.
        assert counts(said) == (17, 17, 6)
        # The second round is refused at its second token, which is another one.
        other = next(token_id for token_id in range(40) if token_id not in said)
        assert counts([*said[:6], other, *said[7:]])[:2] == (18, 16)
        assert counts(plain.text)[1] == 17, "one token a character"
        assert counts(said, speculate=False) == (0, 0, 23)
        assert counts(said, drafters=["prediction"]) == (17, 17, 6)
        first, _ = model.choices([1, 2], 2, max_tokens=24, seed=4, prediction=said)
        assert first.stats.accepted_by_source["prediction"] >= 14, "nothing is drafted while a prompt is read"
        for field, options in (("prediction", {"prediction": [40]}), ("drafters", {"drafters": ["suffix"]})):
            with pytest.raises(paceline.InputError) as caught:
                model.generate([1, 2], **options)
            assert caught.value.field == field
    with scripted_model() as model:
        again = model.generate([1, 2], max_tokens=24, seed=4, prediction=said)
        assert (again.token_ids, again.stats.num_drafted) == (plain.token_ids, 0)


def test_requests_with_predictions_share_passes_with_others() -> None:
    async def all_at_once(model: paceline.Model) -> list[paceline.Generation]:
        asked = [{"seed": seed, "max_tokens": 40} for seed in range(4)]
        plain = [model.generate([seed, 5], speculate=False, **one) for seed, one in enumerate(asked)]  # type: ignore[arg-type]
        for seed, one in enumerate(asked):
            if seed % 2:
                one["prediction"] = [*plain[seed].token_ids[3:20], *plain[seed].token_ids[22:]]  # type: ignore[assignment]
        found = await asyncio.gather(*(model.agenerate([seed, 5], **one) for seed, one in enumerate(asked)))  # type: ignore[arg-type]
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        return found

    with scripted_model(policy=paceline.FixedPolicy(3)) as model:
        found = asyncio.run(all_at_once(model))
        accepted = [one.stats.accepted_by_source["prediction"] for one in found]
        assert accepted[::2] == [0, 0]
        assert min(accepted[1::2]) > 15
