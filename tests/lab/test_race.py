"""A race: what each token added and when, how it ended, and a recording that says the same when it is read again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.api import Model
from paceline.core.arrays import Float64Array
from paceline.core.errors import InputError
from paceline.core.request import Request
from paceline.engines.scripted import ScriptedEngine
from paceline.lab.comparison import Stopped
from paceline.lab.race import Lane, Piece, Race, run_race
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy
from tests.helpers import ForcedDrafter
from tests.lab.scripted_pairs import PASS_S, bytes_vocabulary, scripted_pair

TEXT = "Zähle: eins, zwei, drei, vier.".encode()
PROMPT = [0]
OPTIONS: GenerateOptions = {"max_tokens": len(TEXT), "temperature": 0.0, "seed": 1}


def reciting_model(tokens: Sequence[int]) -> Float64Array:
    """Says the text, whatever it was told."""
    row = np.zeros(256)
    row[TEXT[(len(tokens) - len(PROMPT)) % len(TEXT)]] = 60.0
    return row


def engine() -> ScriptedEngine:
    return scripted_pair(reciting_model)[0]


def next_words(count: int) -> ForcedDrafter:
    """Draft what the text says next, of so many tokens."""

    def paths(request: Request) -> list[list[int]]:
        done = len(request.token_ids) - len(PROMPT)
        return [list(TEXT[done : done + count])]

    return ForcedDrafter(paths)


def raced(drafter: ForcedDrafter | None = None) -> Race:
    target = engine()
    with Model(target, [drafter or next_words(4)], FixedPolicy(4), clock=target.clock) as model:
        return run_race(model, PROMPT, OPTIONS)


def test_both_lanes_say_the_text_at_their_own_times() -> None:
    race = raced()
    assert race.plain.text == race.speculative.text == TEXT.decode()
    assert race.differs_at is None
    assert race.plain.seconds == pytest.approx(PASS_S * (len(TEXT) - 1))
    assert [piece.at_s for piece in race.plain.pieces[:4]] == pytest.approx([0.0, PASS_S, 2 * PASS_S, 3 * PASS_S])
    # Four drafts and the target's own token in every round.
    assert [piece.at_s for piece in race.speculative.pieces[:7]] == pytest.approx([0.0, *[PASS_S] * 5, 2 * PASS_S])
    assert [piece.source for piece in race.speculative.pieces[:7]] == ["target", *["forced"] * 4, "target", "forced"]
    assert race.speedup == pytest.approx(race.plain.seconds / race.speculative.seconds)
    assert race.speedup > 4
    assert race.verdict == "faster"
    assert race.speculative.accepted_by_source == {"forced": race.speculative.num_accepted}


def test_a_character_appears_with_the_token_that_completes_it() -> None:
    pieces = raced().plain.pieces
    assert [piece.text for piece in pieces[:4]] == ["Z", "", "ä", "h"]


def test_a_stop_text_is_no_part_of_a_lane() -> None:
    target = engine()
    with Model(target, [], FixedPolicy(4), clock=target.clock) as model:
        stopping: GenerateOptions = {**OPTIONS, "stop": ["zwei"]}
        generation = model.generate(PROMPT, **stopping)
        lane = Lane.of(generation, bytes_vocabulary())
    assert lane.text == generation.text == "Zähle: eins, "
    assert len(lane.pieces) == len(generation.token_ids)


@pytest.mark.parametrize(
    ("at_s", "count"), [(-1.0, 0), (0.0, 1), (0.5, 1), (1.0, 2), (1000.0, 3)], ids=["-", "0", "half", "1", "end"]
)
def test_a_lane_knows_what_was_there_by_when(at_s: float, count: int) -> None:
    lane = Lane((1, 2, 3), [Piece(text, "target", at_s) for at_s, text in enumerate("abc")])
    assert len(lane.until(at_s)) == count


def lane(seconds: float, *, drafted: int = 0, accepted: int = 0, token_ids: Sequence[int] = range(11)) -> Lane:
    pieces = [Piece("x", "target", seconds * index / 10) for index in range(11)]
    return Lane(tuple(token_ids), pieces, drafted, accepted, {"draft": accepted})


@pytest.mark.parametrize(
    ("speculative", "verdict"),
    [
        (lane(5.0, drafted=8, accepted=6), "faster"),
        (lane(5.0, drafted=8, accepted=1), "unexplained"),
        (lane(12.0, drafted=8, accepted=1), "slower"),
        (lane(10.1, drafted=8, accepted=1), "level"),
        (lane(5.0), "nothing drafted"),
        (lane(5.0, drafted=8, accepted=6, token_ids=range(1, 12)), "texts differ"),
    ],
)
def test_the_verdict_is_no_better_than_what_happened(speculative: Lane, verdict: str) -> None:
    assert Race("", lane(10.0), speculative).verdict == verdict


def test_drafts_bring_a_pass_each_at_most() -> None:
    assert Race("", lane(10.0), lane(9.0, drafted=8, accepted=5)).most_speedup == pytest.approx(2.0)
    assert Race("", lane(10.0), lane(9.0, drafted=20, accepted=10)).most_speedup == pytest.approx(10.0)


def test_a_recording_says_the_same_when_it_is_read_again() -> None:
    race = raced()
    again = Race.from_json(json.loads(json.dumps(race.to_json())))
    assert again.to_json() == race.to_json()
    assert again.speculative.text == race.speculative.text


@pytest.mark.parametrize("facts", [{}, {"prompt": ""}, {"prompt": "", "plain": None, "speculative": {}}, []])
def test_what_is_no_recording_is_told(facts: object) -> None:
    with pytest.raises(InputError, match="not a recorded race"):
        Race.from_json(facts)  # type: ignore[arg-type]


def test_an_empty_lane_is_no_recording() -> None:
    facts = raced().to_json()
    facts["plain"]["pieces"] = []
    with pytest.raises(InputError, match="not a recorded race"):
        Race.from_json(facts)


def test_texts_that_differ_are_explained() -> None:
    """A drafter cannot make a sound target say anything else, so one lane's token is changed afterwards."""
    race = raced()
    token_ids = [*race.speculative.token_ids]
    token_ids[7] += 1
    other = dataclasses.replace(race, speculative=dataclasses.replace(race.speculative, token_ids=token_ids))
    assert other.differs_at == 7
    assert other.to_json()["differs_at"] == 7
    assert raced().divergence is None


def test_an_answer_of_one_token_is_no_race() -> None:
    target = engine()
    with (
        Model(target, [next_words(4)], FixedPolicy(4), clock=target.clock) as model,
        pytest.raises(InputError, match="has 1 token"),
    ):
        run_race(model, PROMPT, {**OPTIONS, "max_tokens": 1})


def test_a_race_ends_where_the_user_wants_no_more() -> None:
    told: list[str] = []
    target = engine()
    with Model(target, [next_words(4)], FixedPolicy(4), clock=target.clock) as model, pytest.raises(Stopped):
        run_race(model, PROMPT, OPTIONS, stopped=lambda: len(told) == 2, tell=told.append)
    assert told == ["plain", "speculative"]
