"""The Python API: load, generate, stream, close."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_draft, embedded_target


def scripted_model(max_sequences: int = 4) -> paceline.Model:
    vocabulary = ScriptedVocabulary.of_size(40, end_ids=[39])
    engine = ScriptedEngine(random_model(40, seed=3, order=2), vocabulary, max_sequences=max_sequences)
    return paceline.Model(engine, [], paceline.NO_SPECULATION)


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


def test_a_seed_is_made_up_and_told() -> None:
    with scripted_model() as model:
        first = model.generate([1], max_tokens=30, temperature=1.5)
        again = model.generate([1], max_tokens=30, temperature=1.5, seed=first.seed)
        other = model.generate([1], max_tokens=30, temperature=1.5, seed=first.seed + 1)
        assert again.token_ids == first.token_ids
        assert other.token_ids != first.token_ids


def test_leaving_a_stream_early_frees_its_place() -> None:
    with scripted_model(max_sequences=1) as model:
        with model.stream([1], max_tokens=1000, temperature=0.0, ignore_end=True) as stream:
            next(iter(stream))
            with pytest.raises(paceline.CapabilityError, match="close one"):
                model.generate([1])
        assert stream.so_far().finish_reason == "cancelled"
        assert len(stream.so_far().token_ids) == 1
        assert model.generate([1], max_tokens=3, ignore_end=True).finish_reason == "length"


def test_use_after_close_is_a_clear_error() -> None:
    model = paceline.load()
    stream = model.stream("x", max_tokens=50)
    next(iter(stream))
    model.close()
    model.close()
    with pytest.raises(paceline.ClosedError, match="closed"):
        model.generate("x")
    with pytest.raises(paceline.ClosedError, match="closed"):
        model.stream("x")
    with pytest.raises(paceline.ClosedError, match="closed"):
        model.loop.add([1], paceline.SamplingParams(), paceline.StopRules())
    assert stream.result().finish_reason == "cancelled"
    assert len(stream.result().token_ids) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "0 tokens"),
        ({"temperature": -1.0}, "temperature -1"),
        ({"stop": ["a", ""]}, "empty stop"),
        ({"tempratur": 1.0}, "tempratur"),
        ({"order": ("top_k",)}, "order top_k"),
    ],
)
def test_bad_options_are_input_errors(options: dict[str, object], words: str) -> None:
    with scripted_model() as model, pytest.raises(paceline.InputError, match=words):
        model.generate([1], **options)  # type: ignore[arg-type]


def test_a_failed_load_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(paceline.ModelFileError, match=r"bad\.gguf"):
        paceline.load(embedded_target(), draft=tmp_path / "bad.gguf")
    with pytest.raises(paceline.InputError, match="no use"):
        paceline.load(embedded_target(), draft=embedded_draft(), policy=paceline.NO_SPECULATION)
    with pytest.raises(paceline.InputError, match="unknown verifier"):
        paceline.load(verify="trust")  # type: ignore[arg-type]


def test_the_engine_holds_every_branch_the_policy_may_ask_for() -> None:
    policy = paceline.FixedPolicy(draft_max=6, siblings=4)
    with paceline.load(drafters=["draft", "suffix"], policy=policy) as model:
        answer = model.generate("def f(x):", max_tokens=24, temperature=0.0, ignore_end=True)
        # A tree with too many branches would be refused by the engine, and every round would decode plainly.
        assert answer.stats.num_drafted > 4 * 6 * answer.stats.rounds // 2
