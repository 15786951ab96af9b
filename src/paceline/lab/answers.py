"""The target's own answers to beginnings of texts, which drafts are measured on.

A draft counts only where all before it was accepted, and that is the target's own text. So agreement on texts of others
says little; the answers are written first, plainly, once for all candidates, and kept. The distribution that the target
drew each token from is kept with them, so that its passes are made once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from paceline.core.arrays import Float64Array, FloatArray, Int64Array
from paceline.core.params import SamplingParams
from paceline.core.request import FinishReason
from paceline.core.sampling import RowSampler, probabilities
from paceline.core.tree import DraftTree
from paceline.core.verify import RowLogits, Verifier, Walk
from paceline.engines.options import ModelOptions, engine_for
from paceline.lab.comparison import Stop
from paceline.lab.sessions import Engines, Session
from paceline.lab.task import Task, is_repetitive
from paceline.models.fingerprints import fingerprint
from paceline.planning.disk_cache import PairKey, load_entry, store_entry
from paceline.planning.policies.fixed import NO_SPECULATION

_VERSION: Final = 1
"""Raised whenever answers are written or kept in another way."""
_LARGEST_ID: Final = 2**31 - 1

_DIGITS: Final = 7
"""Decimals of the probabilities that are kept."""


Place: TypeAlias = tuple[Int64Array, Float64Array]
"""The distribution of one token: ids that may come, and their probabilities after temperature and filters."""


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer of the target.

    Attributes:
        task: the task, whose limit is that of the answer.
        places: the distribution that each token was drawn from.
        passes_s: seconds of the target's passes after the first token; ``None`` if it was not written just now.
    """

    task: Task
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    places: tuple[Place, ...]
    passes_s: float | None = None

    def cut(self, tokens: int) -> WrittenAnswer:
        """Return the answer as it is where no more than so many tokens are allowed."""
        if len(self.token_ids) <= tokens:
            return self
        return WrittenAnswer(self.task, self.token_ids[:tokens], "length", self.places[:tokens])


class Answers:
    """Writes the target's answers to tasks, and finds those that are kept.

    Answers that loop, which flatters every draft, or end at once are left out. They are kept under the content of the
    target's file; ``keep`` allows that, as they are texts.
    """

    def __init__(self, target: ModelOptions, temperature: float, *, keep: bool) -> None:
        self._target = target
        self._temperature = temperature
        self._keep = keep
        self._key: PairKey | None = None
        self._known: dict[str, _StoredAnswer] = {}

    def params(self, task: Task) -> SamplingParams:
        return SamplingParams(temperature=self._temperature, seed=task.seed)

    def write(
        self,
        engines: Engines,
        tasks: Sequence[Task],
        count: int,
        *,
        stopped: Stop,
        in_time: Callable[[], bool],
        report: Callable[[int], None],
    ) -> list[WrittenAnswer]:
        """Return ``count`` answers, the first tasks' that are informative; fewer where there is no time for more.

        Raises ``Stopped`` where the user wants no more; what was written is kept.
        """
        self._load()
        found: list[WrittenAnswer] = []
        has_tried = False
        with Session(engines, [], NO_SPECULATION) as session:
            for task in tasks:
                if len(found) == count:
                    break
                kept, passes_s = self._known.get(_answer_key(task)), None
                if kept is None or not kept.serves(task):
                    if has_tried and not in_time():
                        continue
                    has_tried = True
                    kept, passes_s = self._answer(session, task, stopped)
                    self._known[_answer_key(task)] = kept
                    self._store()
                written = WrittenAnswer(task, kept.token_ids, kept.finish_reason, kept.places, passes_s).cut(
                    task.max_tokens
                )
                if not task.is_short(written.token_ids) and not is_repetitive(written.token_ids):
                    found.append(written)
                    report(len(found))
        return found

    def missing(self, tasks: Sequence[Task], count: int) -> int:
        """Return how many of ``count`` answers are not kept, of the first tasks whose answers are informative."""
        self._load()
        for task in tasks:
            kept = self._known.get(_answer_key(task))
            if count and kept is not None and kept.serves(task):
                token_ids = kept.token_ids[: task.max_tokens]
                count -= not task.is_short(token_ids) and not is_repetitive(token_ids)
        return count

    def _answer(self, session: Session, task: Task, stopped: Stop) -> tuple[_StoredAnswer, float]:
        """Return an answer, and the seconds of its passes."""
        noting: list[_RecordingVerifier] = []

        def note(verifier: Verifier, prompt_ids: Sequence[int]) -> Verifier:
            noting.append(_RecordingVerifier(verifier))
            return noting[0]

        answer = session.answer(task, self._temperature, stopped, speculate=False, wrap=note)
        assert answer.generation is not None
        assert answer.spent is not None
        token_ids = tuple(answer.token_ids)
        places = tuple(noting[0].places[: len(token_ids)])
        kept = _StoredAnswer(task.max_tokens, token_ids, answer.generation.finish_reason, places)
        return kept, answer.spent.verify_s

    def _load(self) -> None:
        if not self._keep or self._key is not None:
            return
        path = Path(self._target.path)
        facts = {
            "answers": _VERSION,
            "file": fingerprint(path),
            "engine": self._target.engine or engine_for(path),
            "temperature": self._temperature,
        }
        self._key = PairKey(facts)
        self._known = load_entry("answers", self._key, _parse_answers) or {}

    def _store(self) -> None:
        if self._key is not None:
            store_entry("answers", self._key, {name: kept.to_json() for name, kept in self._known.items()})


class _RecordingVerifier:
    """Judges as another verifier does, and notes the distributions that tokens of plain decoding are drawn from."""

    def __init__(self, inner: Verifier) -> None:
        self.name = inner.name
        self.sampler = inner.sampler
        self.judges_every_draw = inner.judges_every_draw
        self.propose = inner.propose
        self.places: list[Place] = []
        self._inner = inner

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        def noted(node: int) -> FloatArray:
            row = row_logits(node)
            self.places.append(read_place(self.sampler, row))
            return row

        return self._inner.walk(tree, num_rows, noted, history)


def read_place(sampler: RowSampler, row: FloatArray) -> Place:
    """Return the distribution of a token where a row of logits ``[vocab]`` stands; without penalties."""
    probs = probabilities(sampler.candidates(row, ()), len(row), greedy=sampler.params.greedy)
    ids = np.flatnonzero(probs)
    return ids, probs[ids]


@dataclass(frozen=True, slots=True)
class _StoredAnswer:
    """An answer as it was written with so many tokens allowed."""

    max_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    places: tuple[Place, ...]

    def serves(self, task: Task) -> bool:
        """Whether it is long enough for the task, or ended by itself."""
        return self.max_tokens >= task.max_tokens or self.finish_reason == "end"

    def to_json(self) -> dict[str, Any]:
        places = [[ids.tolist(), np.round(probs, _DIGITS).tolist()] for ids, probs in self.places]
        return {
            "max_tokens": self.max_tokens,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "places": places,
        }


def _parse_answers(data: Any) -> dict[str, _StoredAnswer]:
    found = {}
    for name, kept in dict(data).items():
        reason = kept["finish_reason"]
        if reason not in (None, "end", "length", "stop", "context"):
            raise ValueError(f"an answer that ended by {reason}")
        token_ids = tuple(map(int, kept["token_ids"]))
        places = tuple(
            (np.asarray(ids, dtype=np.int64), np.asarray(probs, dtype=np.float64)) for ids, probs in kept["places"]
        )
        if not len(token_ids) == len(places) or any(ids.shape != probs.shape or ids.ndim != 1 for ids, probs in places):
            raise ValueError(f"{len(token_ids)} tokens drawn at {len(places)} places")
        if min(token_ids, default=0) < 0 or max(token_ids, default=0) > _LARGEST_ID:
            raise ValueError("a token that no vocabulary has")
        found[name] = _StoredAnswer(int(kept["max_tokens"]), token_ids, reason, places)
    return found


def _answer_key(task: Task) -> str:
    """Return the key that an answer is kept under: its prompt and its seed."""
    asked = json.dumps([list(task.prompt_ids), task.seed]).encode()
    return hashlib.sha256(asked).hexdigest()[:32]
