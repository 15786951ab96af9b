"""Scenes of sixteen requests that begin alike, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from paceline.core.params import CacheParams, SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Emission, Request
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import (
    LogitFunction,
    ScriptedEngine,
    ScriptedVocabulary,
    blended_model,
    random_model,
)
from paceline.engines.sequence_pool import SequencePool
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import MoodyPolicy, decode, looping_model
from tests.planning.helpers import Curve
from tests.proofs import Tally

NUM_REQUESTS = 16

MAX_STEPS = 4000


@dataclass(frozen=True)
class Wanted:
    """A request, and the tokens and the text that plain decoding gives it."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    rules: StopRules
    speculation: SpeculationParams
    cache: CacheParams
    token_ids: Sequence[int]
    text: str
    finish_reason: str | None


class Scene:
    """One scene, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.choice((5, 12, 30, 60))
        base = random_model(self.size, seed=seed, order=rng.randint(1, 3), spread=rng.choice((1.0, 2.0, 4.0)))
        looping = rng.random() < 0.5
        self.model: LogitFunction = (
            looping_model(self.size, base, period=rng.randint(1, 4), pull=3.0) if looping else base
        )
        self.vocabulary = ScriptedVocabulary.of_size(self.size, end_ids=[0] if rng.random() < 0.3 else [])
        stems = [self.tokens(rng.randint(0, 40)) for _ in range(rng.randint(1, 4))]
        self.first = [self.wanted([*rng.choice(stems), *self.tokens(rng.randint(1, 6))]) for _ in range(NUM_REQUESTS)]
        # Answers to one prompt.
        self.first += [self.wanted(self.first[0].prompt_ids) for _ in range(rng.randint(0, 3))]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.size) for _ in range(count)]

    def second(self) -> list[Wanted]:
        """Return the next turns of some requests: prompt, answer, and something new."""
        chosen = self.rng.sample(self.first, 6)
        return [self.wanted([*one.prompt_ids, *one.token_ids, *self.tokens(3)], one.cache) for one in chosen]

    def wanted(self, prompt_ids: Sequence[int], cache: CacheParams | None = None) -> Wanted:
        rng = self.rng
        params = SamplingParams(
            rng.choice((0.0, 0.7, 1.0)),
            top_k=rng.choice((0, 4, 40)),
            top_p=rng.choice((1.0, 0.9)),
            min_p=rng.choice((0.0, 0.05)),
            repeat_penalty=rng.choice((1.0, 1.0, 1.2)),
            presence_penalty=rng.choice((0.0, 0.0, 0.4)),
            seed=rng.randrange(3),
            choice=rng.randrange(3),
        )
        stop = (chr(ord("!") + rng.randrange(self.size)) * 2,) if rng.random() < 0.2 else ()
        rules = StopRules(rng.choice((rng.randint(1, 12), 40)), stop, ignore_end=rng.random() < 0.3)
        speculation = SpeculationParams(
            rng.random() < 0.75,
            drafters=rng.choice((None, None, ("suffix",), ("draft", "lookup"))),
            draft_max=rng.choice((None, None, 1, 3)),
        )
        plain = decode(ScriptedEngine(self.model, self.vocabulary), prompt_ids, params, rules)
        cache = cache or CacheParams(rng.random() < 0.9, rng.choice(("", "", "other")), rng.choice(("", "", "a", "b")))
        return Wanted(prompt_ids, params, rules, speculation, cache, plain.token_ids, plain.text, plain.finish_reason)

    def loop(self) -> tuple[DecodingLoop, ScriptedEngine, SequencePool]:
        rng = self.rng
        longest = max(len(one.prompt_ids) + len(one.token_ids) for one in self.first) + 45
        engine = ScriptedEngine(
            self.model,
            self.vocabulary,
            max_rows=rng.choice((4, 16, 64)),
            max_sequences=rng.choice((2, 5, 16, 32)),
            trees=rng.random() < 0.7,
            cells=rng.choice((None, longest, longest + 20, longest * 2)),
            cost=lambda rows, context: 1.0 + 0.05 * rows + 0.001 * context,
        )
        pool = SequencePool(
            engine,
            max_idle=rng.choice((0, 1, 4, 16)),
            max_saved_bytes=rng.choice((0, 400, 1 << 20)),
            least_reuse=rng.choice((1, 3, 8)),
        )
        loop = DecodingLoop(
            engine,
            list(self.drafters()),
            self.policy(),
            pool=pool,
            clock=engine.clock,
            max_running=rng.choice((None, 3, 8)),
            growth=rng.choice((0, 0, 0, 4)),
        )
        return loop, engine, pool

    def drafters(self) -> Iterator[Drafter]:
        other = random_model(self.size, seed=self.rng.getrandbits(32), order=2)
        draft = ScriptedEngine(
            blended_model(self.model, other, self.rng.choice((0.1, 0.3))),
            self.vocabulary,
            max_sequences=self.rng.choice((3, 32)),
            cells=self.rng.choice((None, 150)),
        )
        yield SuffixDrafter()
        pool = SequencePool(draft, max_idle=self.rng.choice((0, 4)), least_reuse=3)
        yield DraftModelDrafter(draft, target_vocab_size=self.size, pool=pool)
        yield LookupDrafter()

    def policy(self) -> Policy:
        kind = self.rng.randrange(3)
        if kind == 0:
            return FixedPolicy(self.rng.randint(1, 6), siblings=self.rng.randint(1, 3))
        if kind == 1:
            return MoodyPolicy(self.rng)
        return AutoPolicy(Curve(lambda rows: 1.0 + 0.05 * rows, lambda rows: 0.05), branches=8)


class Reader:
    """Whoever reads an answer: from emissions alone."""

    def __init__(self, wanted: Wanted, request: Request, cancel_at: int | None) -> None:
        self.wanted = wanted
        self.request = request
        self.cancel_at = cancel_at
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def take(self, emission: Emission) -> None:
        assert self.finish_reason is None, "an emission after the last one"
        self.token_ids += emission.token_ids
        self.text += "".join(segment.text for segment in emission.segments)
        self.finish_reason = emission.finish_reason

    def check(self, tally: Tally) -> None:
        wanted, stats = self.wanted, self.request.stats
        tally["preempted"] += stats.preemptions
        tally["tokens not read again"] += stats.cached_tokens
        tally[f"ended by {self.finish_reason}"] += 1
        if self.finish_reason == "cancelled":
            assert self.cancel_at is not None
            assert self.token_ids == wanted.token_ids[: len(self.token_ids)]
            tally["cut short"] += 1
            return
        assert self.token_ids == wanted.token_ids
        assert self.text == wanted.text
        assert self.finish_reason == wanted.finish_reason
        assert stats.predicted_tokens == len(stats.arrivals_s) == len(self.token_ids)
        assert stats.cached_tokens + stats.prompt_tokens == self.request.num_prompt
        tally["equal to plain decoding"] += 1


def run(loop: DecodingLoop, engine: ScriptedEngine, turn: Sequence[Wanted], rng: random.Random, tally: Tally) -> None:
    joins = sorted(rng.randint(0, 12) for _ in turn)
    readers: dict[int, Reader] = {}
    for step in range(MAX_STEPS):
        while len(readers) < len(turn) and joins[len(readers)] <= step:
            one = turn[len(readers)]
            request = loop.add(one.prompt_ids, one.params, one.rules, one.speculation, one.cache)
            readers[request.id] = Reader(one, request, step + rng.randint(0, 9) if rng.random() < 0.1 else None)
        for reader in readers.values():
            if reader.cancel_at == step and (emission := loop.cancel(reader.request)) is not None:
                reader.take(emission)
        for emission in loop.step():
            readers[emission.request.id].take(emission)
        for request in loop.active:
            if request.sequence >= 0:
                assert engine.length(request.sequence) == request.cached < len(request.token_ids)
        if len(readers) == len(turn) and not loop.active:
            break
    else:
        pytest.fail(f"requests still run after {MAX_STEPS} steps")
    for reader in readers.values():
        reader.check(tally)


def play_seed(seed: int, tally: Tally, prepare: Callable[[DecodingLoop, ScriptedEngine], object] | None = None) -> None:
    scene = Scene(seed)
    loop, engine, pool = scene.loop()
    if prepare is not None:
        prepare(loop, engine)
    run(loop, engine, scene.first, scene.rng, tally)
    run(loop, engine, scene.second(), scene.rng, tally)
    assert pool.used_cells <= (engine.capabilities.cells or 1 << 30)
    pool.drop_all()
    assert not engine._sequences, "a sequence is left open"
    tally["scenes"] += 1
