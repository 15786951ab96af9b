"""Scenes: requests that are decoded plainly, and then together in several ways, each of which has to say the same."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
from hypothesis import settings

from paceline.core.constraint import Constraint
from paceline.core.errors import NoRoomError
from paceline.core.logprobs import LogprobParams
from paceline.core.params import LLAMA_CPP_ORDER, TRANSFORMERS_ORDER, SamplingParams, SpeculationParams, StopRules
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.following import FollowingDrafter
from paceline.drafters.lookup import PREDICTION, LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.base import Step
from paceline.engines.scripted import (
    LogitFunction,
    ScriptedEngine,
    ScriptedOutput,
    ScriptedVocabulary,
    blended_model,
    random_model,
    table_model,
)
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import (
    NO_LOGPROBS,
    Answer,
    CountingPool,
    MoodyPolicy,
    ScribblingDrafter,
    WatchingPolicy,
    decode,
    frozen,
    looping_model,
    resized,
    text_of,
)
from tests.proofs import Tally

SETUPS_PER_SCENE = 5

PARTIAL = "with partial rejection"
BOUNDED = "with partial rejection, on targets that take back rows of one pass alone"
EVERY_END = {f"ended by {reason}": 1 for reason in ("stop", "end", "length", "context")}
"""Cases of a tally."""

CALM = (True, True, True, True, False)
"""Whether a scene is calm: budgets, grammars and drafts meet where there is room, and texts end where there is none."""

MAX_STEPS = 1000

HEAD_SIZE = 128

# Some tokens are parts of characters, some several characters, so that stop texts and characters cross token borders.
PIECES = (b"a", b"b", b"ab", b"\xc3", b"\xa9", b" ", b"ba ", b"\xf0\x9f", b"\x98\x80", b"", b"c\n", "ñ".encode())

STOP_TEXTS = ("aa", "ab", "ba a", "é", "bb", "\nc", "a b", "b\u00e9a", "\ufffd", "c\nc", "ñab")


@dataclass(frozen=True)
class Setup:
    """One way to speculate; what it does in detail (whims, sizes) comes from ``seed``."""

    seed: int
    drafters: tuple[str, ...]
    draft_distance: float
    policy: str
    siblings: int
    trees: bool
    max_rows: int
    max_outputs: int
    cells: str
    cancels: bool

    @property
    def max_rollback(self) -> int | None:
        """Rows that its target can take back, where it has no trees: as a recurrent model, or any number."""
        return None if self.trees else random.Random(self.seed).choice((16, None, 8, 3))

    @property
    def shares_passes(self) -> bool:
        """Whether several requests are in one pass of its target."""
        return self.seed % 6 > 0


@dataclass(frozen=True)
class Scene:
    """What is decoded, and the setups that all have to decode the same; the contents come from ``seed``.

    ``calm`` scenes have what speculation likes: room, long answers, drafts that are right more often than not. Most
    partial rejections come from them. The others are cramped in every way there is.
    """

    seed: int
    calm: bool
    vocab_size: int
    model: str
    spread: float
    float32: bool
    temperatures: tuple[float, ...]
    processors: str
    short_context: bool
    stops: bool
    setups: tuple[Setup, ...]


MakeDraft: TypeAlias = Callable[[Scene, Setup, random.Random, LogitFunction, ScriptedVocabulary], FollowingDrafter[Any]]
"""Makes a scene's draft model, given its target and that one's vocabulary."""


class CountingEngine(ScriptedEngine):
    """Counts the passes it refuses for want of cells, to show that the retry without drafts is exercised."""

    num_refused = 0

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        try:
            return super().forward(steps)
        except NoRoomError:
            self.num_refused += 1
            raise


def play(proof: str, number: int, check: Callable[[Scene], None]) -> None:
    """Check random scenes: the same ones each time, unless ``HYPOTHESIS_PROFILE=explore`` has new ones looked for.

    Each is drawn from the proof's name and its number alone. What hypothesis draws depends on every number in the
    sources, too, and takes long.
    """
    first = 0 if settings().derandomize else random.randrange(2**32)
    for index in range(first, first + number):
        try:
            check(draw_scene(random.Random(f"{proof} {index}")))
        except BaseException as error:
            error.add_note(f"in scene {index} of {proof!r}")
            raise


def draw_scene(rng: random.Random) -> Scene:
    some = rng.choice
    calm = some(CALM)
    return Scene(
        seed=rng.getrandbits(32),
        calm=calm,
        vocab_size=some((17, 8, 30, 12, 60, 5, 20, 4, 24, 3, 9, 2, 100, 250, 700, 1500, 4000)),
        model=some(("random", "looping", "table", "ties")),
        spread=some((1.5, 0.5, 3.0) if calm else (1.5, 6.0, 0.05)),
        float32=some((False, True)),
        temperatures=tuple(rng.choices((2.0, 1.0, 0.5, 0.0), k=rng.randint(2, 4))),
        processors=some(("all", "all", "none", "some")),
        short_context=not calm and some((False, True)),
        stops=not calm and some((False, True)),
        setups=tuple(draw_setup(rng, calm) for _ in range(SETUPS_PER_SCENE)),
    )


def draw_setup(rng: random.Random, calm: bool) -> Setup:
    some = rng.choice
    return Setup(
        seed=rng.getrandbits(32),
        drafters=tuple(rng.sample(("draft", "scribble", "suffix", "lookup"), some((2, 3, 4) if calm else (1, 2, 3)))),
        draft_distance=some((0.3, 0.4, 0.2) if calm else (0.0, 0.1, 0.3, 1.0)),
        policy=some(("fixed", "moody", "picky", "fixed", "moody", "auto")),
        siblings=some((1, 1, 2, 3)),
        trees=some((True, True, False)),
        max_rows=some((60, 200) if calm else (5, 1, 2, 12, 30, 60)),
        max_outputs=some((200, 60) if calm else (30, 1, 7)),
        cells=some(("plenty", "enough", "too few")),
        cancels=some((False, False, False, True) if calm else (False, True)),
    )


def build_model(scene: Scene, rng: random.Random) -> LogitFunction:
    size, seed = scene.vocab_size, rng.getrandbits(32)
    dtype = np.float32 if scene.float32 else np.float64
    if scene.model == "table":
        num_rows = min(size, 64)
        table = table_model(np.random.default_rng(seed).normal(0.0, scene.spread, (num_rows, size)))
        return frozen(lambda tokens: table([tokens[-1] % num_rows]), dtype)
    base = random_model(size, seed=seed, order=rng.randint(1, 3), spread=scene.spread)
    if scene.model == "looping":
        base = looping_model(
            size,
            base,
            period=rng.randint(1, 4),
            pull=rng.choice((1.0, 2.0) if scene.calm else (2.0, 5.0)) * scene.spread,
        )
    if scene.model == "ties":
        inner = base
        return frozen(lambda tokens: np.round(inner(tokens)), dtype)
    return frozen(base, dtype)


def build_speculation(setup: Setup, rng: random.Random) -> SpeculationParams:
    """Return what one of several requests asks of speculation, mostly nothing in particular."""
    if rng.random() < 0.75:
        return SpeculationParams()
    drafters = tuple(rng.sample(setup.drafters, rng.randint(1, len(setup.drafters))))
    draft_max = rng.choice((None, 1, 3, 6))
    return SpeculationParams(
        rng.random() < 0.7,
        drafters=rng.choice((None, drafters)),
        draft_max=draft_max,
        draft_min=rng.choice((0, 0, rng.randint(0, draft_max or 5))),
        p_min=rng.choice((0.0, 0.0, 0.0, 0.3)),
        policy=rng.choice((None, "fixed")),
    )


def predict(expected: Answer, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return what a request predicts: mostly nothing, or its answer with changes, or anything."""
    rng = random.Random(seed)
    if rng.random() < 0.7:
        return ()
    if rng.random() < 0.2:
        return tuple(rng.choices(range(vocab_size), k=rng.randint(1, 40)))
    said = list(expected.token_ids)
    for _ in range(rng.randint(0, 4)):
        place, gone = rng.randint(0, len(said)), rng.choice((0, 1, 3, 20))
        said[place : place + gone] = rng.choices(range(vocab_size), k=rng.choice((0, 1, 3, 20)))
    return tuple(said)


def build_params(scene: Scene, rng: random.Random, index: int) -> SamplingParams:
    temperature = scene.temperatures[index % len(scene.temperatures)]
    seed = rng.getrandbits(64)
    if scene.processors == "none":
        return SamplingParams(temperature, 0, 1.0, 0.0, seed=seed)
    everything = scene.processors == "all"

    def maybe(value: float, off: float) -> float:
        return value if everything or rng.random() < 0.5 else off

    order = rng.choice((LLAMA_CPP_ORDER, TRANSFORMERS_ORDER, tuple(rng.sample(LLAMA_CPP_ORDER, len(LLAMA_CPP_ORDER)))))
    if seed % 10 == 0:
        place = seed % (len(order) + 1)
        order = (*order[:place], "infill", *order[place:])
    biases = {rng.randrange(scene.vocab_size): rng.choice((-2.0, 1.0, 3.0)) for _ in range(2)}
    if scene.vocab_size > 4 and order[0] == "logit_bias":
        # A ban after truncation might leave nothing to emit.
        biases[rng.randrange(scene.vocab_size)] = -np.inf
    return SamplingParams(
        temperature=temperature,
        top_k=int(maybe(rng.choice((2, 20, 40, 1000)), 0)),
        top_p=maybe(rng.choice((0.5, 0.9, 0.98)), 1.0),
        min_p=maybe(rng.choice((0.01, 0.05, 0.2)), 0.0),
        repeat_penalty=maybe(rng.choice((0.8, 1.1, 1.5)), 1.0),
        presence_penalty=maybe(rng.choice((-0.5, 0.3)), 0.0),
        frequency_penalty=maybe(rng.choice((-0.2, 0.2)), 0.0),
        penalty_last_n=rng.choice((-1, 4, 64)),
        logit_bias=biases if everything or rng.random() < 0.5 else {},
        seed=seed,
        choice=rng.randint(0, 2),
        order=order,
        **build_rare_filters(random.Random(seed)),
    )


def build_rare_filters(rng: random.Random) -> dict[str, Any]:
    """Return what most requests leave alone: of every third request some, of every tenth all."""
    share = rng.choice((0.0,) * 6 + (0.5,) * 3 + (1.0,))
    found: dict[str, Any] = {}
    for filter_ in (
        {"top_n_sigma": rng.choice((0.8, 2.0))},
        {"typical_p": rng.choice((0.5, 0.9))},
        {"dynatemp_range": rng.choice((0.3, 1.0)), "dynatemp_exponent": rng.choice((0.7, 1.0, 2.0))},
        {"xtc_probability": rng.choice((0.3, 1.0)), "xtc_threshold": rng.choice((0.02, 0.1))},
        {
            "dry_multiplier": rng.choice((0.5, 2.0)),
            "dry_allowed_length": rng.choice((0, 1, 3)),
            "dry_penalty_last_n": rng.choice((-1, 10)),
            "dry_sequence_breakers": rng.choice(((), ("a",), ("b a", "c"))),
        },
    ):
        if rng.random() < share:
            found |= filter_
    return found


def build_drafters(
    scene: Scene,
    setup: Setup,
    rng: random.Random,
    target: LogitFunction,
    plain: Sequence[Answer],
    draft_model: Callable[[], FollowingDrafter[Any]] | None = None,
) -> Iterator[Drafter]:
    for name in setup.drafters:
        if name == "suffix":
            yield SuffixDrafter(min_match=rng.randint(1, 3))
        elif name == "lookup":
            shortest = rng.randint(1, 2)
            yield LookupDrafter(shortest + rng.randint(0, 3), shortest)
        elif name == "scribble":
            yield ScribblingDrafter(
                rng,
                scene.vocab_size,
                futures={tuple(answer.prompt_ids): answer.token_ids for answer in plain},
                branching=setup.trees,
                luck=rng.choice((0.6, 0.7, 0.8) if scene.calm else (0.3, 0.9)),
                most_nodes=rng.choice((5, 12, 40)),
            )
        else:
            yield draft_model() if draft_model is not None else same_vocabulary(scene, setup, rng, target)


def same_vocabulary(
    scene: Scene,
    setup: Setup,
    rng: random.Random,
    target: LogitFunction,
    vocabulary: ScriptedVocabulary | None = None,
) -> FollowingDrafter[Any]:
    """Return a draft model with the target's ids; some are padded, or lack the last one."""
    size = max(2, scene.vocab_size + rng.choice((0, 0, 3, -1)))
    other = random_model(scene.vocab_size, seed=rng.getrandbits(32), order=2, spread=scene.spread)
    model = frozen(resized(blended_model(target, other, setup.draft_distance), scene.vocab_size, size))
    engine = draft_engine(scene, rng, model, ScriptedVocabulary.of_size(scene.vocab_size + 3))
    return DraftModelDrafter(engine, target_vocab_size=scene.vocab_size, pool=draft_pool(rng, engine))


def draft_engine(
    scene: Scene, rng: random.Random, model: LogitFunction, vocabulary: ScriptedVocabulary
) -> ScriptedEngine:
    return ScriptedEngine(
        model,
        vocabulary,
        context_length=4096 if scene.calm else rng.choice((40, 7, 3, 2)),
        max_rows=64 if scene.calm else rng.choice((64, 5, 2, 1)),
        max_sequences=4 if scene.calm else rng.choice((4, 1)),
        cells=None if scene.calm else rng.choice((None, 60, 25)),
    )


def draft_pool(rng: random.Random, engine: ScriptedEngine) -> CountingPool:
    """Return a pool that reuses anything from nothing at all to every token that two texts share."""
    return CountingPool(
        engine,
        max_idle=rng.choice((4, 1, 0)),
        max_saved_bytes=rng.choice((1 << 20, 200, 0)),
        least_reuse=rng.choice((1, 3, 8)),
    )


@dataclass(frozen=True)
class SteepCosts:
    """Passes of a second and a share more for every further row and cached token; drafts cost a share of a row."""

    row: float
    token: float
    draft: float
    change_s: float = 0.0

    def is_measured(self, rows: int) -> bool:
        return True

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        return 1.0 + self.row * (rows - requests) + self.token * context

    def draft_s(self, rows: int = 1, context: int = 0) -> float:
        return self.draft * rows


def build_policy(scene: Scene, setup: Setup, rng: random.Random, costs: SteepCosts) -> Policy:
    if setup.policy == "moody":
        return MoodyPolicy(rng)
    if setup.policy == "auto":
        return AutoPolicy(costs, draft_max=rng.choice((16, 4)), siblings=setup.siblings, branches=rng.choice((8, 2, 0)))
    most = rng.choice((4, 5, 8) if scene.calm else (1, 3, 5))
    if setup.policy == "fixed":
        return FixedPolicy(most, siblings=setup.siblings)
    return FixedPolicy(most, rng.randint(0, most), rng.choice((0.0, 0.2, 0.5)), setup.siblings)


class Asked(NamedTuple):
    """What a request is asked for."""

    params: SamplingParams
    rules: StopRules
    constraint: Constraint | None = None
    logprobs: LogprobParams = NO_LOGPROBS


Amend: TypeAlias = Callable[[random.Random, Answer, ScriptedVocabulary], Asked]
"""Makes another request of one that was decoded plainly."""

Watch: TypeAlias = Callable[[Policy], WatchingPolicy]


def check_scene(
    scene: Scene,
    tally: Tally,
    *,
    amend: Amend | None = None,
    watch: Callable[[Policy], WatchingPolicy] = WatchingPolicy,
    pieces: Sequence[bytes] = PIECES,
    draft_model: MakeDraft = same_vocabulary,
    make_model: Callable[[Scene, random.Random], LogitFunction] = build_model,
    make_engine: Callable[..., CountingEngine] = CountingEngine,
    prepare: Callable[[DecodingLoop, CountingEngine], object] | None = None,
) -> None:
    """Decode a scene's requests plainly and then in each of its setups, and compare.

    What is told to the tally is each time a request, but for refused passes and reused tokens. One with partial
    rejection ended by itself after a round in which a draft was accepted and the walk then left the tree where more was
    drafted: the hard case.
    """
    tally["scenes"] += 1
    rng = random.Random(scene.seed)
    model = make_model(scene, rng)
    end_ids = rng.sample(range(scene.vocab_size), rng.randint(0, 2)) if scene.vocab_size > 4 else []
    vocabulary = ScriptedVocabulary([pieces[i % len(pieces)] for i in range(scene.vocab_size)], end_ids)
    num_requests = 4 if scene.calm else rng.randint(1, 4)
    prompts = []
    for _ in range(num_requests):
        phrase = rng.choices(range(scene.vocab_size), k=rng.randint(1, 6))
        prompts.append([*(phrase * 3)[: rng.randint(1, 14)], rng.randrange(scene.vocab_size)])
    context_length = max(map(len, prompts)) + rng.randint(1, 12) if scene.short_context else 4096
    engine = ScriptedEngine(model, vocabulary, context_length=context_length)
    plain = []
    for index, prompt in enumerate(prompts):
        rules = StopRules(
            max_tokens=rng.choice((20, 28) if scene.calm else (1, 8, 16, 24)),
            stop=tuple(rng.sample(STOP_TEXTS, rng.randint(1, 3))) if scene.stops else (),
            ignore_end=scene.calm or rng.random() < 0.5,
        )
        answer = decode(engine, prompt, build_params(scene, rng, index), rules)
        if amend is not None:
            asked = amend(rng, answer, vocabulary)
            answer = decode(
                engine, prompt, asked.params, asked.rules, constraint=asked.constraint, logprobs=asked.logprobs
            )
        plain.append(answer)
    for setup in scene.setups:
        assert_equals_plain(
            scene, setup, model, vocabulary, context_length, plain, tally, watch, draft_model, make_engine, prepare
        )


def assert_equals_plain(
    scene: Scene,
    setup: Setup,
    model: LogitFunction,
    vocabulary: ScriptedVocabulary,
    context_length: int,
    plain: Sequence[Answer],
    tally: Tally,
    watch: Watch,
    draft_model: MakeDraft = same_vocabulary,
    make_engine: Callable[..., CountingEngine] = CountingEngine,
    prepare: Callable[[DecodingLoop, CountingEngine], object] | None = None,
) -> None:
    """Decode the requests of ``plain`` together and speculatively, some cancelled on the way, and compare."""
    rng = random.Random(setup.seed)
    num_requests = len(plain)
    lengths = [len(answer.request.token_ids) for answer in plain]
    # The last token of an answer is not read, but where nothing can follow it.
    num_errors = sum(answer.finish_reason == "error" for answer in plain)
    cells = {
        "plenty": None,
        # Room for all the plain requests together and hardly more: passes with drafts are refused again and again,
        # but no request may end for it.
        "enough": sum(lengths) - num_requests + num_errors + rng.randint(0, 3),
        # Room for any one of them: others lose their place, and go on later.
        "too few": max(lengths) + rng.randint(0, 3),
    }[setup.cells]
    costs = SteepCosts(rng.choice((0.0, 0.01, 0.3)), rng.choice((0.0, 0.001)), rng.choice((0.0, 0.01, 0.2)))
    drift = rng.choice((1.0, 1.0, 0.3, 4.0))
    engine = make_engine(
        model,
        vocabulary,
        cost=lambda rows, context: drift * costs.round_s(rows, context),
        context_length=context_length,
        max_rows=setup.max_rows,
        max_outputs=min(setup.max_outputs, setup.max_rows),
        max_sequences=num_requests,
        trees=setup.trees,
        max_rollback=setup.max_rollback,
        cells=cells,
        shares_passes=setup.shares_passes,
    )
    make_draft = functools.partial(draft_model, scene, setup, rng, model, vocabulary)
    drafters = list(build_drafters(scene, setup, rng, model, plain, make_draft))
    policy = watch(build_policy(scene, setup, rng, costs))
    growth = rng.choice((0, 0, 3, 16))
    loop = DecodingLoop(engine, drafters, policy, clock=engine.clock, observers=policy.observers, growth=growth)
    if prepare is not None:
        prepare(loop, engine)
    joins = [0, *(rng.randint(0, 6) for _ in range(num_requests - 1))]
    cancels = {index: rng.randint(0, 8) for index in range(num_requests) if setup.cancels and rng.random() < 0.4}

    answers: dict[int, Answer] = {}
    for step in range(MAX_STEPS):
        for index, expected in enumerate(plain):
            if index not in answers and joins[index] <= step:
                predicted = predict(expected, scene.vocab_size, setup.seed + index)
                speculation = replace(build_speculation(setup, rng), prediction=predicted)
                if speculation.drafters is not None and setup.seed % 2:
                    speculation = replace(speculation, drafters=(*speculation.drafters, PREDICTION))
                tally["plain beside others"] += not speculation.speculate
                request = expected.request
                answers[index] = Answer(
                    loop.add(
                        expected.prompt_ids,
                        request.params,
                        request.rules,
                        speculation,
                        logprobs=request.logprob_params,
                        constraint=expected.constraint,
                    )
                )
            if index in cancels and step == joins[index] + cancels[index]:
                emission = loop.cancel(answers[index].request)
                if emission is not None:
                    answers[index].take(emission)
        by_request = {answer.request.id: answer for answer in answers.values()}
        for emission in loop.step():
            by_request[emission.request.id].take(emission)
        check_caches(loop, engine, drafters)
        if len(answers) == num_requests and not loop.active:
            break
    else:
        pytest.fail(f"requests still run after {MAX_STEPS} steps")

    for index, answer in answers.items():
        expected = plain[index]
        stats, speculation = answer.request.stats, answer.request.speculation
        tally["preempted"] += stats.preemptions
        tally["accepted a part of a prediction"] += (
            0 < stats.accepted_by_source[PREDICTION] < stats.drafted_by_source[PREDICTION]
        )
        tally["accepted by a policy of its own"] += (
            speculation.speculate and speculation.policy == "fixed" and stats.num_accepted > 0
        )
        if answer.finish_reason == "cancelled":
            assert index in cancels
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            assert answer.text == text_of(vocabulary, answer.token_ids, expected.request.rules)
            tally["cut short"] += 1
        else:
            assert answer.token_ids == expected.token_ids
            assert answer.finish_reason == expected.finish_reason
            assert answer.text == expected.text
            assert answer.logprobs == expected.logprobs
            partial = policy.partial[answer.request.id] > 0
            tally["equal to plain decoding"] += 1
            tally[PARTIAL] += partial
            tally[BOUNDED] += partial and setup.max_rollback is not None
            tally["in passes of its own"] += not setup.shares_passes
            tally[f"ended by {answer.finish_reason}"] += 1
    assert policy.active == set(), "the policy was not told of every end"
    tally["refused passes"] += engine.num_refused
    # Nothing leaks: every sequence can be opened again.
    models = [drafter for drafter in drafters if isinstance(drafter, FollowingDrafter)]
    for drafter in models:
        assert isinstance(drafter.pool, CountingPool)
        tally["reused tokens"] += drafter.pool.reused_tokens
        drafter.pool.drop_all()
        assert drafter.pool.used_cells == 0
    for some_engine in (engine, *(drafter.engine for drafter in models)):
        for _ in range(some_engine.capabilities.max_sequences):
            some_engine.open()


def check_caches(loop: DecodingLoop, engine: ScriptedEngine, drafters: Sequence[Drafter]) -> None:
    """Check what holds between rounds: the target's cache lacks the last token, the draft's is part of the text."""
    for request in loop.active:
        if request.sequence < 0:
            assert request.cached == 0, "a request that waits holds nothing"
            continue
        assert engine.length(request.sequence) == request.cached
        assert not request.decoding or request.cached == len(request.token_ids) - 1
        for drafter in drafters:
            if isinstance(drafter, FollowingDrafter):
                follower = drafter._followers.get(request.id)
                if follower is not None and follower.sequence is not None:
                    assert isinstance(drafter.engine, ScriptedEngine)
                    assert drafter.engine.length(follower.sequence) == follower.cached
                    held = drafter.engine._sequences[follower.sequence].committed
                    if drafter.engine.capabilities.reads_states:
                        held = [token_id for token_id, _ in held]
                    # What a translated draft has ahead of the text is part of it in the next round, or dropped.
                    ahead: list[int] = getattr(follower, "ahead", [])
                    seen = follower.text[follower.start : follower.start + follower.cached - len(ahead)]
                    assert held == drafter._readable(seen) + ahead
                    assert follower.start + follower.cached - len(ahead) <= len(follower.text)
