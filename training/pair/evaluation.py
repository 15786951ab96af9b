"""All the measurements of one pair, text by text.

Three kinds of context are looked at: held-out text, the pair's own greedy text, and its own sampled text. One pass over
each serves every figure that needs its rows. Under coupled verification the pair writes what its target alone would
write, so the texts that live acceptance is counted on are also the target's own outputs, and those judged for looping.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.api import Model
from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import Engine
from paceline.lab.intervals import ALL, Depth, Ratio, Share, Tally, depths
from paceline.lab.task import is_repetitive
from training.pair.logit_rows import (
    LiveText,
    count_copied,
    measure_loss,
    read_paired_rows,
    row_acceptance,
    write,
)

CONTEXT_TOKENS = 512
"""Longest text that either model reads here."""

PROMPT_TOKENS = 128
"""Tokens of each held-out text that are given as a prompt."""

DRAFT_LENGTH = 8
"""Drafts of a round in live runs: all of them verified, whatever the draft thinks of them."""

SIDE_TOKENS = 64
"""Tokens of an answer in settings that only coupled acceptance is measured in; every second prompt gives one."""

CONTEXTS_PER_TEXT = 32
"""Places in a held-out text where coupled acceptance is computed."""

PASSAGE_TOKENS, INTERLUDE_TOKENS, COPIED_TOKENS = 128, 64, 32
"""The passage that comes twice, the text in between, and the tokens to copy after half of the second copy."""

AGREEMENT_BAR = 0.65
"""Least share of held-out tokens at which the argmax of both models should be the same."""

LOOPING_BAR = 0.05
"""Share of sampled answers that may loop."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to sample."""

    temperature: float
    filters: bool = True

    def params(self, seed: int) -> SamplingParams:
        if self.filters:
            return SamplingParams(temperature=self.temperature, seed=seed)
        return SamplingParams(temperature=self.temperature, seed=seed, top_k=0, top_p=1.0, min_p=0.0)

    @property
    def name(self) -> str:
        if self.temperature == 0.0:
            return "greedy"
        return f"temperature {self.temperature:g}, {'default' if self.filters else 'no'} filters"


GREEDY = Setting(0.0)
SAMPLED = Setting(0.8)
SETTINGS = (
    GREEDY,
    Setting(0.5),
    SAMPLED,
    Setting(1.0),
    Setting(0.5, filters=False),
    Setting(0.8, filters=False),
    Setting(1.0, filters=False),
)
_FULL = (GREEDY, SAMPLED)


@dataclass(frozen=True, slots=True)
class Bar:
    """Something the pair was made to reach."""

    name: str
    value: float | None
    wanted: str
    met: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything measured. Inner dictionaries go by kind of text, with all kinds pooled under ``"all"``.

    Attributes:
        texts: held-out texts of each kind.
        loss: ``target`` and ``draft`` by unit, ``nats_per_token`` and ``bits_per_byte``, on held-out text.
        agreement: of both models' argmax on ``held-out`` text, and on own text by setting.
        coupled: by setting: acceptance in closed form on ``held-out`` and ``own`` text and on the places that were
            ``judged`` in live runs, and as ``measured`` there.
        coupled_deviation: by setting: measured less closed form on the judged places, in standard errors of the
            draws; ``None`` where nothing is random.
        chain: by setting: acceptance by depth.
        looping: by setting: answers that loop; as ``held-out``, the texts themselves where the answers stand.
        ended: by setting: answers with an end-of-generation token in them, which was written over.
        copying: share of tokens copied ``with`` the passage in the context and ``without`` it.
        bars: what the pair was made to reach.
    """

    texts: Mapping[str, int]
    loss: Mapping[str, Mapping[str, Mapping[str, Ratio]]]
    agreement: Mapping[str, Mapping[str, Ratio]]
    coupled: Mapping[str, Mapping[str, Mapping[str, Ratio]]]
    coupled_deviation: Mapping[str, Mapping[str, float | None]]
    chain: Mapping[str, Mapping[str, Sequence[Depth]]]
    looping: Mapping[str, Mapping[str, Share]]
    ended: Mapping[str, Mapping[str, Share]]
    copying: Mapping[str, Mapping[str, Ratio]]
    bars: Sequence[Bar]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(slots=True)
class _Coupled:
    """Tallies of coupled acceptance in one setting."""

    heldout: Tally = field(default_factory=Tally)
    own: Tally = field(default_factory=Tally)
    judged: Tally = field(default_factory=Tally)
    measured: Tally = field(default_factory=Tally)
    variance: Tally = field(default_factory=Tally)

    def ratios(self) -> dict[str, dict[str, Ratio]]:
        tallies = {"held-out": self.heldout, "own": self.own, "judged": self.judged, "measured": self.measured}
        return {name: tally.ratios() for name, tally in tallies.items()}

    def deviations(self) -> dict[str, float | None]:
        expected, variances = self.judged.totals(), self.variance.totals()
        return {
            group: (hits - expected[group]) / math.sqrt(variances[group]) if variances[group] > 0.0 else None
            for group, hits in self.measured.totals().items()
        }


@dataclass(slots=True)
class _Writing:
    """Tallies of answers of full length in one setting."""

    agreement: Tally = field(default_factory=Tally)
    looping: Tally = field(default_factory=Tally)
    ended: Tally = field(default_factory=Tally)
    by_depth: list[Tally] = field(default_factory=lambda: [Tally() for _ in range(DRAFT_LENGTH)])

    def chain(self) -> dict[str, list[Depth]]:
        groups = [tally.groups() for tally in self.by_depth]
        return {group: depths([at_depth[group] for at_depth in groups]) for group in groups[0]}


class Evaluation:
    """Takes texts one after the other, and keeps the tallies."""

    def __init__(self, model: Model, *, max_tokens: int, seed: int, advance: Callable[[float], None]) -> None:
        (drafter,) = model.drafters
        assert isinstance(drafter, DraftModelDrafter)
        self._model = model
        self._target: Engine = model.target
        self._draft: Engine = drafter.engine
        self._max_tokens = max_tokens
        self._seed = seed
        self._advance = advance
        self._texts: dict[str, int] = {}
        self._loss = {
            (name, unit): Tally() for name in ("target", "draft") for unit in ("nats_per_token", "bits_per_byte")
        }
        self._heldout_agreement = Tally()
        self._coupled = {setting: _Coupled() for setting in SETTINGS}
        self._writing = {setting: _Writing() for setting in _FULL}
        self._heldout_looping = Tally()
        self._copying = {"with": Tally(), "without": Tally()}

    def take(self, kind: str, token_ids: Sequence[int]) -> None:
        """Measure everything on one held-out text of at least two tokens; what is beyond the context is left out."""
        number = sum(self._texts.values())
        of_kind = self._texts[kind] = self._texts.get(kind, 0) + 1
        token_ids = token_ids[:CONTEXT_TOKENS]
        self._read_heldout(kind, token_ids)
        written = token_ids[PROMPT_TOKENS : PROMPT_TOKENS + self._max_tokens]
        whole = len(written) == self._max_tokens
        self._heldout_looping.add(kind, whole and is_repetitive(written), int(whole))
        self._copy(kind, token_ids)
        for setting in SETTINGS:
            full = setting in self._writing
            if full or of_kind % 2 == 1:
                max_tokens = self._max_tokens if full else min(SIDE_TOKENS, self._max_tokens)
                params = setting.params(self._seed + number)
                text = write(self._model, token_ids[:PROMPT_TOKENS], params, max_tokens)
                self._advance(max_tokens)
                self._read_own(kind, setting, text)
                if full:
                    self._count(kind, setting, text)

    def figures(self) -> Figures:
        """Return what was measured so far."""
        agreement = {"held-out": self._heldout_agreement.ratios()}
        agreement |= {setting.name: writing.agreement.ratios() for setting, writing in self._writing.items()}
        looping = {"held-out": self._heldout_looping.shares()}
        looping |= {setting.name: writing.looping.shares() for setting, writing in self._writing.items()}
        return Figures(
            texts=self._texts,
            loss={
                unit: {name: self._loss[name, unit].ratios() for name in ("target", "draft")}
                for unit in ("nats_per_token", "bits_per_byte")
            },
            agreement=agreement,
            coupled={setting.name: coupled.ratios() for setting, coupled in self._coupled.items()},
            coupled_deviation={setting.name: coupled.deviations() for setting, coupled in self._coupled.items()},
            chain={setting.name: writing.chain() for setting, writing in self._writing.items()},
            looping=looping,
            ended={setting.name: writing.ended.shares() for setting, writing in self._writing.items()},
            copying={name: tally.ratios() for name, tally in self._copying.items()},
            bars=_bars(agreement["held-out"][ALL].value, looping[SAMPLED.name][ALL].value),
        )

    def _read_heldout(self, kind: str, token_ids: Sequence[int]) -> None:
        for name, engine in (("target", self._target), ("draft", self._draft)):
            on_text = measure_loss(engine, token_ids)
            self._loss[name, "nats_per_token"].add(kind, on_text.nats, on_text.tokens)
            self._loss[name, "bits_per_byte"].add(kind, on_text.nats / math.log(2), on_text.num_bytes)
        samplers = {setting: RowSampler(setting.params(0)) for setting in SETTINGS}
        places = set(np.linspace(1, len(token_ids) - 1, CONTEXTS_PER_TEXT).astype(int).tolist())
        same = 0
        sums = dict.fromkeys(SETTINGS, 0.0)
        for index, target_row, draft_row in read_paired_rows(self._target, self._draft, token_ids):
            same += bool(target_row.argmax() == draft_row.argmax())
            if index in places:
                for setting, sampler in samplers.items():
                    sums[setting] += row_acceptance(target_row, draft_row, sampler)
        self._heldout_agreement.add(kind, same, len(token_ids) - 1)
        for setting, total in sums.items():
            self._coupled[setting].heldout.add(kind, total, len(places))
        self._advance(reading_work(2 * len(token_ids)))

    def _read_own(self, kind: str, setting: Setting, text: LiveText) -> None:
        """Compare both models on an answer, and live verdicts with the chances of where they were given."""
        sampler = RowSampler(setting.params(0))
        chances = []
        same = 0
        token_ids = [*text.prompt_ids, *text.token_ids]
        for _, target_row, draft_row in read_paired_rows(self._target, self._draft, token_ids, len(text.prompt_ids)):
            same += bool(target_row.argmax() == draft_row.argmax())
            chances.append(row_acceptance(target_row, draft_row, sampler))
        judged = [
            (chance, verdict) for chance, verdict in zip(chances, text.verdicts, strict=True) if verdict is not None
        ]
        coupled = self._coupled[setting]
        coupled.own.add(kind, sum(chances), len(chances))
        coupled.judged.add(kind, sum(chance for chance, _ in judged), len(judged))
        coupled.variance.add(kind, sum(chance * (1 - chance) for chance, _ in judged), len(judged))
        coupled.measured.add(kind, sum(verdict for _, verdict in judged), len(judged))
        if setting in self._writing:
            self._writing[setting].agreement.add(kind, same, len(chances))
        self._advance(reading_work(len(token_ids)))

    def _count(self, kind: str, setting: Setting, text: LiveText) -> None:
        writing = self._writing[setting]
        writing.looping.add(kind, is_repetitive(text.token_ids), 1)
        writing.ended.add(kind, text.ended, 1)
        for depth, tally in enumerate(writing.by_depth):
            tally.add(kind, text.accepted_by_depth[depth], text.tested_by_depth[depth])

    def _copy(self, kind: str, token_ids: Sequence[int]) -> None:
        """Give a passage, what follows it, and the passage again up to its middle."""
        passage = token_ids[:PASSAGE_TOKENS]
        half = PASSAGE_TOKENS // 2
        following = passage[half : half + COPIED_TOKENS]
        if len(following) < COPIED_TOKENS:
            return
        again = [*token_ids[PASSAGE_TOKENS : PASSAGE_TOKENS + INTERLUDE_TOKENS], *passage[:half]]
        for name, context in (("with", [*passage, *again]), ("without", again)):
            self._copying[name].add(kind, count_copied(self._target, context, following), COPIED_TOKENS)


def work(texts: int, max_tokens: int) -> float:
    """Return how much work so many texts of one kind are, as ``advance`` will be told if they fill the context."""
    full, halved = len(_FULL), len(SETTINGS) - len(_FULL)
    side_tokens = min(SIDE_TOKENS, max_tokens)
    answers = full * texts * (max_tokens + reading_work(PROMPT_TOKENS + max_tokens))
    side_answers = halved * ((texts + 1) // 2) * (side_tokens + reading_work(PROMPT_TOKENS + side_tokens))
    return texts * reading_work(2 * CONTEXT_TOKENS) + answers + side_answers


def reading_work(rows: int) -> float:
    """Return what reading ``rows`` with both models takes, in tokens that they could have written meanwhile."""
    return 0.25 * rows


def _bars(agreement: float | None, looping: float | None) -> list[Bar]:
    return [
        Bar(
            "same argmax on held-out text",
            agreement,
            f"at least {AGREEMENT_BAR:.0%}",
            agreement is not None and agreement >= AGREEMENT_BAR,
        ),
        Bar(
            f"answers that loop, {SAMPLED.name}",
            looping,
            f"under {LOOPING_BAR:.0%}",
            looping is not None and looping < LOOPING_BAR,
        ),
    ]
