"""What is advised hangs on what was found; and the flags of other programs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InputError
from paceline.engines.scripted import ScriptedVocabulary
from paceline.lab.agreement import Agreement
from paceline.lab.doctor.advice import give_advice
from paceline.lab.doctor.examiner import Diagnosis
from paceline.lab.doctor.export import PROGRAMS, Export, Pair, check_program, export
from paceline.lab.doctor.prediction import Prediction, Speed
from paceline.lab.intervals import ALL, Interval, Ratio
from paceline.lab.vocabulary_fit import compare_vocabularies
from paceline.models.description import ModelDescription, describe
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost
from tests.lab.doctor.helpers import LETTERS, TEXTS

TARGET, DRAFT = describe(embedded_target()), describe(embedded_draft())
LARGE = dataclasses.replace(
    TARGET, num_bytes=4_500_000_000, num_parameters=8_000_000_000, file_type="Q4_0", layers=32, width=4096
)


def speed(gain: float, **more: Any) -> Speed:
    return Speed("", Interval(10 * gain, None, None), Interval(gain, None, None), 1.0, None, **more)


def predicted(over_none: float = 0.9, **changes: Any) -> Prediction:
    found = Prediction(
        plain=speed(1.0),
        without_model=speed(1.0),
        auto=speed(1.0),
        static=speed(1.01, draft_max=3, p_min=0.0),
        lengths=((3, 1.1),),
        gain_by_kind={"code": 1.0, "prose": 1.0},
        over_none=Interval(over_none, over_none - 0.01, over_none + 0.01),
        draft_cost=0.1,
        break_even=0.3,
        closed_form=1.1,
        texts=4,
        tokens=400,
    )
    return dataclasses.replace(found, **changes)


def costs(*passes_s: float) -> CostProfile:
    return CostProfile(PassCost(tuple(WidthCost.of(rows, [seconds]) for rows, seconds in enumerate(passes_s, 1))))


def told(
    prediction: Prediction | None,
    *,
    accepted: float = 0.5,
    draft: ModelDescription = DRAFT,
    target: ModelDescription = LARGE,
    profile: CostProfile | None = None,
    left_out: Sequence[str] = (),
    **options: Any,
) -> str:
    share = {ALL: Ratio(accepted, None, 10, 4)}
    vocabulary = ScriptedVocabulary(LETTERS)
    diagnosis = Diagnosis(
        "draft",
        draft,
        compare_vocabularies(vocabulary, vocabulary, TEXTS),
        Agreement(share, share, share),
        prediction=prediction,
        profile=profile,
        left_out=left_out,
    )
    return "\n".join(give_advice(diagnosis, target, **options))


COPY = dataclasses.replace(LARGE, num_bytes=2_600_000_000, file_type="Q2_K")
WIDE = dataclasses.replace(DRAFT, vocabulary_size=262_144, width=640, num_parameters=268_000_000)
WHOLE = dataclasses.replace(LARGE, num_bytes=16_000_000_000, file_type="F16")
MIXTURE = dataclasses.replace(LARGE, experts=8)
DEAR, CHEAP = costs(1, 2, 2.5, 3, 3.5), costs(1, 1.1, 1.2, 1.3, 1.4)
FASTER, SLOWER = speed(1.1, draft_max=3, p_min=0.0), speed(0.9, draft_max=1, p_min=0.0)
OWN_QUANT = "the target has 4.5 bits a weight (Q4_0): its own lower quant cannot pay, as it reads 58% of the same bytes"
TRAINING = "training it on the target's answers should help"


@pytest.mark.parametrize(
    ("prediction", "options", "words"),
    [
        (predicted(0.9), {"draft": COPY}, OWN_QUANT),
        (predicted(1.5), {"accepted": 0.69}, "69% accepted: distilling will not help much"),
        (predicted(0.9), {"accepted": 0.3}, TRAINING),
        (
            predicted(0.9, draft_cost=0.4),
            {},
            "a token of this draft takes 0.40 times as long as a plain one, and at this agreement 0.30",
        ),
        (
            predicted(0.9, draft_cost=0.4),
            {"draft": WIDE},
            "63% of the draft's weights are one row for each of its 262,144 tokens",
        ),
        (predicted(0.9), {"profile": DEAR}, "a pass that verifies 4 drafts takes 3.5 plain passes"),
        (predicted(0.9), {"profile": DEAR, "target": MIXTURE}, "mixture of experts"),
        (predicted(0.9, break_even=None, static=SLOWER), {}, "no draft pays here, however cheap"),
        (predicted(1.0, static=FASTER), {}, "try it with --draft-max 3 and --compare"),
        (predicted(1.0, tokens=23), {}, "too short to tell (23 tokens)"),
        (predicted(1.5, without_model=speed(1.3)), {}, "lookups in the text alone gain 1.30 times"),
        (predicted(1.5, gain_by_kind={"code": 1.6, "prose": 1.1}), {}, "1.60 times on code, 1.10 on prose"),
        (predicted(1.5), {"draft_on_cpu": True}, "the draft runs on the CPU"),
        (
            predicted(1.5),
            {"left_out": ["calibrating by short answers", "2 of 4 answers"]},
            "there was no time for calibrating by short answers and 2 of 4 answers: raise --budget-s",
        ),
        (
            predicted(1.5, tokens=15),
            {"left_out": ["3 of 4 answers"]},
            "there was no time for 3 of 4 answers; 15 tokens are too few to tell: raise --budget-s",
        ),
    ],
)
def test_what_is_advised(prediction: Prediction, options: dict[str, Any], words: str) -> None:
    assert words in told(prediction, **options)


@pytest.mark.parametrize(
    ("prediction", "options", "words"),
    [
        (predicted(1.5), {}, "."),  # nothing at all
        (predicted(1.5), {"draft": COPY}, "cannot pay"),  # it does
        (predicted(0.9), {}, "cannot pay"),  # another model
        (predicted(0.9), {"draft": COPY, "target": WHOLE}, "cannot pay"),
        (predicted(0.9, draft_cost=0.25), {"accepted": 0.3}, "."),  # training would not make it cheap
        (predicted(0.9), {"accepted": 0.5}, "."),
        (predicted(1.5, draft_cost=0.4), {}, "."),  # it pays all the same
        (predicted(0.9), {"profile": CHEAP}, "."),
        (predicted(1.5, static=FASTER), {}, "--draft-max"),
        (predicted(1.0), {}, "--draft-max"),
        # Of so few tokens nothing else is said: what would be hopeless of more is not known to be.
        (predicted(0.9, tokens=23, break_even=None, static=SLOWER), {}, "no draft pays here|--draft-max"),
    ],
)
def test_what_is_not_advised(prediction: Prediction, options: dict[str, Any], words: str) -> None:
    assert not re.search(words, told(prediction, **options))


# --- other programs ---------------------------------------------------------------------------------------------------


def pair(target: ModelDescription = TARGET, draft: ModelDescription = DRAFT, **options: Any) -> Pair:
    vocabulary = ScriptedVocabulary(LETTERS)
    relation = compare_vocabularies(vocabulary, vocabulary, TEXTS).relation
    return Pair(target, draft, options.pop("relation", relation), options.pop("draft_max", 5), **options)


def folder(name: str, size: int = 27) -> ModelDescription:
    return ModelDescription(Path(name), "huggingface", 1, vocabulary_size=size)


def told_of(program: str, found: Pair) -> Export:
    (name,) = check_program(program)
    return export(name, found)


def test_llama_server_is_told_to_draft() -> None:
    said = told_of("llama-server", pair(p_min=0.4))
    assert said.command == (
        f"llama-server -m {TARGET.path} -md {DRAFT.path} --spec-type draft-simple --spec-draft-n-max 5 "
        "--spec-draft-p-min 0.4"
    )
    assert not said.refuses
    assert "-ngl all -ngld all" in told_of("llama-server", pair(has_devices=True)).command
    assert "--spec-draft-n-max 3" in told_of("llama-server", pair(draft_max=None)).command


def test_ik_llama_has_names_of_its_own() -> None:
    assert told_of("ik_llama", pair(p_min=0.4)).command.endswith("--spec-type draft:n_max=5,p_min=0.4")


def test_gguf_files_are_nothing_for_vllm_and_folders_nothing_for_llama_server() -> None:
    assert len(told_of("vllm", pair()).refuses) == 2
    assert len(told_of("sglang", pair()).refuses) == 2
    for program in ("llama-server", "ik_llama", "lmstudio"):
        assert len(told_of(program, pair(folder("a"), folder("b"))).refuses) == 2


def test_vllm_needs_equal_sizes_or_shared_tokens_alone() -> None:
    said = told_of("vllm", pair(folder("a b"), folder("c")))
    assert said.command == (
        'vllm serve \'a b\' --speculative-config \'{"method":"draft_model","model":"c","num_speculative_tokens":5}\''
    )
    assert not said.refuses
    assert told_of("vllm", pair(folder("a", 152064), folder("b", 151936))).refuses == (
        "vocab_size is 152064 and 151936, padding included, and must be equal",
    )
    other = compare_vocabularies(ScriptedVocabulary(LETTERS), ScriptedVocabulary(LETTERS[::-1]), TEXTS).relation
    assert '"use_heterogeneous_vocab":true' in told_of("vllm", pair(folder("a"), folder("b"), relation=other)).command


def test_sglang_needs_equal_tokens() -> None:
    said = told_of("sglang", pair(folder("a"), folder("b")))
    assert said.command.endswith(
        "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
    )
    assert not said.refuses
    other = compare_vocabularies(ScriptedVocabulary(LETTERS), ScriptedVocabulary([*LETTERS, b"ab"]), TEXTS).relation
    assert told_of("sglang", pair(folder("a"), folder("b"), relation=other)).refuses


def test_transformers_translates_another_vocabulary() -> None:
    assert "assistant_tokenizer" not in told_of("transformers", pair()).command
    other = compare_vocabularies(ScriptedVocabulary(LETTERS), ScriptedVocabulary(LETTERS[::-1]), TEXTS).relation
    said = told_of("transformers", pair(relation=other)).command
    assert "tokenizer=tokenizer, assistant_tokenizer=draft_tokenizer" in said
    compile(said, "said", "exec")


def test_all_programs_have_an_export() -> None:
    assert check_program("all") == PROGRAMS
    for program in PROGRAMS:
        assert export(program, pair()).program == program
    with pytest.raises(InputError, match="choose from llama-server"):
        check_program("ollama")
