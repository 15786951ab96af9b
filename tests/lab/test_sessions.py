from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.sampling import RowSampler
from paceline.core.verify import CoupledVerifier, Verifier
from paceline.lab import sessions
from paceline.lab.comparison import finish
from paceline.lab.sessions import ForcedVerifier, Session
from paceline.lab.task import Task
from paceline.options import read_options
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from tests.helpers import ForcedDrafter
from tests.lab.scripted_pairs import LEVEL_S, PASS_S, counting_model, engines

REFERENCE = tuple(random.Random(5).randrange(256) for _ in range(41))
TASK = Task("editing-forced", "code:1", (1, 2, 3), len(REFERENCE), reference_ids=REFERENCE)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafters", [[], ["draft"], ["suffix", "lookup"], ["draft", "suffix", "lookup"]])
def test_every_run_says_the_reference(drafters: list[str], temperature: float) -> None:
    loaded = engines()
    with Session(loaded, drafters, FixedPolicy(4) if drafters else NO_SPECULATION) as session:
        for speculate in (False, True):
            answer = finish(session.start(TASK, temperature, speculate=speculate), lambda: False)
            assert tuple(answer.token_ids) == REFERENCE
            assert answer.finish_reason == "length"


def test_plain_runs_cost_a_pass_for_every_token() -> None:
    with Session(engines(), [], NO_SPECULATION) as session:
        stats = finish(session.start(TASK, 0.0, speculate=False), lambda: False).stats
    assert stats.rounds == len(REFERENCE) - 1
    assert stats.decode_s == pytest.approx(PASS_S * (len(REFERENCE) - 1))


def test_a_draft_is_accepted_where_it_is_the_reference_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two right tokens and a wrong one in every round: rounds of three tokens, two thirds of the drafts accepted."""

    def paths(request: Request) -> list[list[int]]:
        ahead = list(REFERENCE[request.num_output : request.num_output + 3])
        return [[*ahead[:2], *((token + 1) % 256 for token in ahead[2:])]]

    drafter = ForcedDrafter(paths, name="suffix")
    monkeypatch.setattr(sessions, "build_drafters", lambda *names, **engines: [drafter])
    session = Session(engines(), ["suffix"], FixedPolicy(3))
    answer = finish(session.start(TASK, 0.0, speculate=True), lambda: False)
    assert tuple(answer.token_ids) == REFERENCE
    stats = answer.stats
    # 40 tokens come in 13 rounds of three and one of a single token, with no room left for drafts.
    assert stats.rounds == 14
    assert stats.num_accepted == 26
    assert stats.num_drafted == 39
    assert dict(stats.accepted_by_depth) == {0: 13, 1: 13}
    assert dict(stats.tested_by_depth) == {0: 13, 1: 13, 2: 13}


def test_the_draft_model_is_judged_by_the_reference_not_by_the_target() -> None:
    """The draft says what the target would say, which is not the reference: all of it is paid for and turned down."""
    with Session(engines(), ["draft"], FixedPolicy(2)) as session:
        stats = finish(session.start(TASK, 0.0, speculate=True), lambda: False).stats
    model = counting_model()
    lucky = sum(int(model([before]).argmax()) == after for before, after in itertools.pairwise(REFERENCE))
    assert stats.num_accepted <= lucky
    assert stats.phases.draft_s >= LEVEL_S * (stats.rounds - 1)


def test_past_the_reference_the_target_speaks_for_itself() -> None:
    task = Task("editing-forced", "code:1", (1, 2, 3), 10, reference_ids=(9, 8))
    with Session(engines(), ["draft"], FixedPolicy(3)) as session:
        answer = finish(session.start(task, 0.0, speculate=True), lambda: False)
    expected = [9, 8]
    while len(expected) < 10:
        expected.append((5 * expected[-1] + 7) % 256)
    assert list(answer.token_ids) == expected


def test_proposals_are_drawn_as_without_forcing() -> None:
    with Session(engines(), ["draft"], FixedPolicy(3)) as session:
        verifiers: list[Verifier] = []

        def see(verifier: Verifier, prompt_ids: Sequence[int]) -> Verifier:
            verifiers.append(verifier)
            return verifier

        session.reference_ids = REFERENCE
        session._start(TASK.prompt_ids, read_options({"temperature": 0.8}), wrap=see).close()
        (verifier,) = verifiers
        assert isinstance(verifier, ForcedVerifier)
        row = counting_model()([5])
        free = CoupledVerifier(RowSampler(SamplingParams(temperature=0.8)))
        assert verifier.propose(row, 3, [1, 2, 3], 2) == free.propose(row, 3, [1, 2, 3], 2)
