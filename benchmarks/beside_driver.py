"""Drafts of a head beside those of llama.cpp's own driver, round by round: the same tokens, and as many accepted.

The driver is ``examples/speculative-simple`` of llama.cpp's sources, built against the library in use. Both sides go on
with the same text greedily, on one thread, with keys and values of one type and drafts of one length. What the head
drafts depends on the text alone, so wherever a round of each begins at the same token, both must draft the same.

What may part them is rounding: passes of other numbers of rows sum in another order, so states differ in their last
bits, of quantised models in more, and where the head's two best tokens are as good as tied it then drafts the other.
The driver says how likely it found either.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, cast

import llama_cpp
import numpy as np
import typer
from rich.progress import track

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Request
from paceline.drafters.base import Drafter
from paceline.drafters.head import HeadDrafter
from paceline.drafters.registry import build_drafters
from paceline.engines.base import Engine, lender
from paceline.engines.llama_cpp.states import HeadFile, own_head, read_head
from paceline.engines.loading import open_engine, open_head
from paceline.engines.options import OUTPUT_STATE, CacheType, ModelOptions
from paceline.lab.doctor.samples import PROMPT_TOKENS, heldout_samples
from paceline.machine import machine
from paceline.models.description import describe
from paceline.models.registry import MTP_DRAFT, resolve_model
from paceline.planning.base import RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop

EPILOG = """[bold]Examples[/bold]

python -m benchmarks beside-driver ./speculative-simple -m target -md eagle3.gguf

python -m benchmarks beside-driver ./speculative-simple -m qwen35.gguf -md mtp --cache-type f16
"""

_CONTEXT: Final = 1024
_LEAST_PROMPT: Final = 16
_TIE: Final = 0.01
"""Largest difference of two probabilities, of which the driver writes three digits, that is a tie."""

_TRIES: Final = 20
"""Runs of the driver for an answer: where the machine is busy it may end before the last of its log is written."""

_CANDIDATE: Final = re.compile(r" - seq_id 0, draft candidate +(\d+), pos +\d+: +(\d+) \( *([\d.]+)\)")
_COUNT: Final = re.compile(r"n_predict = (\d+)")
_ROUND: Final = re.compile(r"accepted (\d+)/(\d+) draft tokens, the last target token is: \((\d+)\)")


@dataclass(frozen=True, slots=True)
class Round:
    """A round of either side.

    Attributes:
        drafted: up to a token that ends the text: the driver drafts on behind it.
        accepted: how many of them were.
        candidates: of the driver, for each drafted token: the likeliest, and how likely.
    """

    drafted: tuple[int, ...]
    accepted: int
    candidates: tuple[dict[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What one side made of a prompt: the text, and the rounds by the number of its tokens before each."""

    token_ids: list[int]
    rounds: dict[int, Round]


@dataclass(frozen=True, slots=True)
class _Rounds:
    """An observer that notes the rounds of a request."""

    answer: Answer
    end_ids: Collection[int]

    def observe(self, record: RoundRecord) -> None:
        for request, tree, path, emitted in zip(
            record.requests, record.trees, record.paths, record.emitted, strict=True
        ):
            drafted = _until(tree.token_ids[1:], self.end_ids)
            self.answer.rounds[request.num_output - emitted] = Round(drafted, len(path))


class DriversMtp(HeadDrafter):
    """An MTP layer that reads the first token, too, with a state of zeros, as the driver has it do.

    Layers are trained without.
    """

    def _follow(self, request: Request) -> Any:
        follower = super()._follow(request)
        follower.start = 0
        return follower

    def _first_readable(self, follower: Any) -> int:
        return 0

    def _states(self, follower: Any, start: int, stop: int) -> FloatArray:
        if start:
            return super()._states(follower, start, stop)
        states = super()._states(follower, 1, stop)
        return np.concatenate((np.zeros((1, states.shape[1]), np.float32), states))


def beside_driver(
    program: Annotated[Path, typer.Argument(help="llama.cpp's speculative-simple.", metavar="SPECULATIVE-SIMPLE")],
    model: Annotated[str, typer.Option("-m", "--model", help="The target: a GGUF file, or a name.")],
    head: Annotated[str, typer.Option("-md", "--draft", help="A GGUF file with a head, or mtp for the target's own.")],
    prompts: Annotated[int, typer.Option("--prompts", help="Number of prompts.", min=1)] = 20,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of an answer.", min=1)] = 200,
    depth: Annotated[int, typer.Option("--draft-max", help="Tokens of a draft, but of blocks.", min=1, max=16)] = 4,
    cache: Annotated[str, typer.Option("--cache-type", help="Of keys and values, of target and head.")] = "f32",
) -> None:
    """Compare a head's drafts with those of llama.cpp's own driver, round by round."""
    path, file = resolve_model(model), None if head == MTP_DRAFT else Path(head)
    kind = own_head(path) if file is None else read_head(file)
    if kind is None:
        raise InputError(f"{path.name} has no MTP layer that drafts here: give the file of a head (-md)")
    if kind.block is not None:
        # Of another length, a block says other tokens.
        depth = kind.block.size
    command = [str(program.absolute()), "-m", str(path), "--spec-draft-n-max", str(depth), "--temp", "0", "-t", "1"]
    command += ["--spec-type", _spec_type(kind), "-lv", "5"]
    context = min(_CONTEXT, describe(path).context_length or _CONTEXT)
    command += ["-c", str(context), "-n", str(tokens), "-fa", "off", "-ctk", cache, "-ctv", cache]
    command += ["-ctkd", cache, "-ctvd", cache, *([] if file is None else ["-md", str(file)])]
    options = ModelOptions(
        path,
        context_length=context,
        max_sequences=1,
        threads=1,
        flash_attention=False,
        cache_type_k=cast(CacheType, cache),
        cache_type_v=cast(CacheType, cache),
        hold_states=kind.layers,
    )
    target = open_engine(options)
    figures = []
    try:
        drafter = driver_like(target, options, file)
        try:
            for name, text, prompt_ids in track(_prompts(target, prompts), "in turn", total=prompts, transient=True):
                theirs = ask_driver([*command, "-p", text], prompt_ids[-1], target.vocabulary.end_ids)
                # The driver drafts before it has read the prompt's last token, which is the answer's first of ours.
                ours = decode(target, [drafter], prompt_ids[:-1], tokens + depth, depth)
                figures.append({"prompt": name, **compare(ours, theirs, tokens - depth)})
        finally:
            drafter.close()
    finally:
        target.close()
    for row in figures:
        rounds, apart, (accepted, drafted), driver = row["rounds"], len(row["apart"]), row["ours"], row["driver"]
        print(
            f"{row['prompt']:9} {row['tokens']:4} tokens, {rounds - apart} of {rounds} rounds equal, "
            f"{row['ties']} parted by ties; accepted {accepted} of {drafted}, by the driver {driver[0]} of {driver[1]}"
        )
    print(json.dumps({"machine": machine(), "beside_driver": {"model": path.name, "head": head, "prompts": figures}}))
    if names := [row["prompt"] for row in figures if len(row["apart"]) > row["ties"]]:
        raise CapabilityError(f"another draft than the driver's, and no tie: {', '.join(names)}")
    if sum(row["rounds"] for row in figures) < prompts:
        raise CapabilityError("hardly a round was compared: give another model, or more tokens (-n)")


def _spec_type(head: HeadFile) -> str:
    if head.block is not None:
        return "draft-dspark" if head.block.follows else "draft-dflash"
    return "draft-eagle3" if head.kind == "eagle3" else "draft-mtp"


def driver_like(target: Engine, options: ModelOptions, file: Path | None) -> Drafter:
    """Return the head in a file, or the target's own, to be used as the driver does."""
    head = open_head(target, options, file)
    if options.hold_states == (OUTPUT_STATE,) and lender(head) is None:
        return DriversMtp(head, target=target.vocabulary)
    return build_drafters(["draft"], target=target, draft=head)[0]


def compare(ours: Answer, theirs: Answer, end: int) -> dict[str, Any]:
    """Return what the rounds that begin before ``end`` drafted, how many are equal, and which are not.

    Texts may part at near-ties of the target. In the round that ends a text the driver goes on behind its end.
    """
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    same = next((number for number, (one, other) in enumerate(pairs) if one != other), end)
    end = min(end, same, max(ours.rounds, default=0))
    starts = sorted(start for start in ours.rounds.keys() & theirs.rounds.keys() if start < end)
    apart, ties = [], 0
    for start in starts:
        one, other = ours.rounds[start], theirs.rounds[start]
        if (one.drafted, one.accepted) != (other.drafted, other.accepted):
            ties += _is_tie(one, other)
            apart.append({"token": start, "ours": asdict(one), "driver": asdict(other)})
    found: dict[str, Any] = {"tokens": end, "rounds": len(starts), "apart": apart, "ties": ties}
    for name, answer in (("ours", ours), ("driver", theirs)):
        rounds = [each for start, each in answer.rounds.items() if start < end]
        found[name] = [sum(each.accepted for each in rounds), sum(len(each.drafted) for each in rounds)]
    return found


def _is_tie(one: Round, other: Round) -> bool:
    """Return whether the first tokens that differ were as good as equally likely to the driver."""
    for token_id, driver_id, likely in zip(one.drafted, other.drafted, other.candidates, strict=False):
        if token_id != driver_id:
            return token_id in likely and likely[driver_id] - likely[token_id] <= _TIE
    return False


def _prompts(target: Engine, count: int) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, text and tokens of beginnings that end with what the target says, and are read as these tokens."""
    vocabulary = target.vocabulary
    for sample in heldout_samples():
        token_ids = vocabulary.tokenize(sample.text[:4096])[:PROMPT_TOKENS]
        for length in range(len(token_ids), _LEAST_PROMPT, -1):
            prompt_ids = [*token_ids[:length], *decode(target, [], token_ids[:length], 1, 0).token_ids]
            try:
                text = b"".join(map(vocabulary.token_bytes, prompt_ids)).decode()
            except UnicodeDecodeError:
                continue
            ends = prompt_ids[-1] in vocabulary.end_ids
            if not ends and vocabulary.tokenize(text) == prompt_ids and "\0" not in text:
                yield sample.name, text, prompt_ids
                count -= 1
                break
        if not count:
            return


def decode(target: Engine, drafters: Sequence[Drafter], prompt_ids: Sequence[int], tokens: int, depth: int) -> Answer:
    answer = Answer([], {})
    loop = DecodingLoop(
        target,
        drafters,
        FixedPolicy(depth) if drafters else NO_SPECULATION,
        observers=[_Rounds(answer, target.vocabulary.end_ids)],
    )
    loop.add(list(prompt_ids), SamplingParams(temperature=0.0), StopRules(tokens))
    while loop.active:
        for emission in loop.step():
            answer.token_ids.extend(emission.token_ids)
    return answer


def ask_driver(command: Sequence[str], first: int, end_ids: Collection[int]) -> Answer:
    """Return what the driver's log tells of an answer, behind the token that is its prompt's last."""
    libraries = Path(llama_cpp.__file__).parent.parent / "lib"
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    for _ in range(_TRIES):
        try:
            done = subprocess.run(command, capture_output=True, env=environment, check=True)
        except FileNotFoundError:
            raise InputError(f"{command[0]} does not exist: give the path of speculative-simple") from None
        except (OSError, subprocess.CalledProcessError) as error:
            raise CapabilityError(f"{command[0]} failed ({error}): build it against this llama.cpp") from None
        log = (done.stdout + done.stderr).decode(errors="replace")
        answer = read_log(log, first, end_ids)
        if (count := _COUNT.search(log)) and int(count.group(1)) == len(answer.token_ids) - 1:
            return answer
    raise CapabilityError(f"{command[0]} left no whole log in {_TRIES} runs: build it of this llama.cpp's sources")


def read_log(log: str, first: int, end_ids: Collection[int]) -> Answer:
    answer = Answer([first], {})
    likely: list[dict[int, float]] = []
    for line in log.splitlines():
        if found := _CANDIDATE.search(line):
            if found[1] == "0":
                likely.append({})
            likely[-1][int(found[2])] = float(found[3])
        elif found := _ROUND.search(line):
            accepted, count, last = map(int, found.groups())
            drafted = [next(iter(each)) for each in likely[:count]]
            answer.rounds[len(answer.token_ids)] = Round(_until(drafted, end_ids), accepted, tuple(likely))
            answer.token_ids.extend([*drafted[:accepted], last])
            likely = []
    return answer


def _until(token_ids: Sequence[int], end_ids: Collection[int]) -> tuple[int, ...]:
    """Return tokens up to one that ends a text."""
    for index, token_id in enumerate(token_ids):
        if token_id in end_ids:
            return tuple(token_ids[: index + 1])
    return tuple(token_ids)
