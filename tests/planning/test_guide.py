"""The guide's own code, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cost_tables import PASS_MS

from paceline.core.params import StopRules
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model
from paceline.lab.replaying.recording import save_recordings
from paceline.lab.replaying.replay import replay
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import FixedPolicy
from tests.helpers import PLAIN_PARAMS, decode
from tests.planning.helpers import Skill, synthetic, table

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "add-a-policy.md"


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def namespace(blocks: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(blocks[0], str(GUIDE), "exec"), names)
    return names


def test_the_policy_is_lossless_live(namespace: dict[str, Any]) -> None:
    model = random_model(8, seed=1)
    vocabulary = ScriptedVocabulary.of_size(8)
    draft = ScriptedEngine(blended_model(model, random_model(8, seed=2), 0.3), vocabulary)
    policy: Policy = namespace["WhilePaying"]()
    plain = decode(ScriptedEngine(model, vocabulary), [1, 2], PLAIN_PARAMS, StopRules(80))
    answer = decode(
        ScriptedEngine(model, vocabulary, cost=lambda rows, context: 1.0 + 0.01 * rows),
        [1, 2],
        PLAIN_PARAMS,
        StopRules(80),
        drafters=[DraftModelDrafter(draft, target_vocab_size=8)],
        policy=policy,
    )
    assert answer.token_ids == plain.token_ids
    assert answer.request.stats.num_accepted > 20


def test_the_policy_does_what_the_guide_says(namespace: dict[str, Any]) -> None:
    """It keeps most of a good draft's gain, and gives up a bad one but for a probe now and then."""
    costs = table(PASS_MS["F16"])
    for right in (0.95, 0.0):
        recordings = [synthetic(seed, {"draft": Skill(right)}, num_tokens=100) for seed in range(3)]
        plain_s, drafting_s, its_s = (
            replay(recordings, policy, costs).decode_s
            for policy in (FixedPolicy(0), FixedPolicy(4), namespace["WhilePaying"]())
        )
        if right:
            assert drafting_s < its_s < drafting_s + 0.25 * (plain_s - drafting_s)
        else:
            assert plain_s < its_s < 1.1 * plain_s < drafting_s


def test_the_replay_runs(
    namespace: dict[str, Any],
    blocks: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_recordings(Path("pair.npz"), [synthetic(seed, {"draft": Skill(0.8)}) for seed in range(2)])
    exec(compile(blocks[1], str(GUIDE), "exec"), namespace)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    # A plain round of Q4_0 takes 16 ms.
    assert lines[0].startswith("62.5 tokens/s, ")
