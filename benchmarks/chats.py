"""Conversations beside llama-server: as it comes, and with its n-gram drafts.

Each side has the same model and says what it says to the same messages of a user, with its own answers between them.
What limits the speed is the machine's memory, and how much of an answer can be foreseen. Sides take turns, conversation
by conversation. llama-server's n-gram drafter remembers what it said, and is started anew for each conversation.
paceline leaves cores to other processes, and has to see first that the other side's is done.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

import paceline
from benchmarks.conversations import CONVERSATIONS, Conversation
from benchmarks.progress import progress_bar
from benchmarks.server_process import ServerProcess
from paceline.core.errors import InputError
from paceline.core.params import MAX_TOKENS
from paceline.engines.threads import PERIOD_S
from paceline.machine import machine
from paceline.models.registry import resolve_model

EPILOG = """[bold]Examples[/bold]

python -m benchmarks chats ./llama-server -m instruct.gguf

python -m benchmarks chats ./llama-server -m instruct.gguf --temp 0.8 --repeats 5

python -m benchmarks chats ./llama-server -m instruct.gguf --exact --repeats 1  [dim]# texts are equal[/dim]
"""

OURS, PLAIN, SERVER, NGRAM = "paceline", "paceline plain", "llama-server", "llama-server ngram-mod"
_SEED: Final = 1
_RUN_IN_S: Final = 2 * PERIOD_S


class _Spoken(NamedTuple):
    """What a side said in a conversation.

    Attributes:
        tokens: but for the first of each answer, which comes with its prompt.
        seconds: from the first token of each answer to its last.
        texts: of the answers.
        num_prompt: tokens of the last prompt.
    """

    tokens: int
    seconds: float
    texts: list[str]
    num_prompt: int

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


_Side = Callable[[Conversation], _Spoken]


def chats(
    program: Annotated[Path, typer.Argument(help="llama-server.", metavar="LLAMA-SERVER")],
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file of a chat model.")],
    temp: Annotated[float, typer.Option("--temp", "--temperature", help="0 decodes greedily.")] = 0.0,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Most tokens of an answer.")] = 200,
    repeats: Annotated[int, typer.Option("--repeats", help="Times each side has every conversation.")] = 3,
    exact: Annotated[
        bool, typer.Option("--exact", help="paceline by arithmetic that does not depend on a pass's width.")
    ] = False,
) -> None:
    """Measure ten conversations beside llama-server."""
    if repeats < 1 or tokens < 2:
        raise InputError(f"{repeats} times with answers of {tokens} tokens: the least is 1 with 2")
    path = resolve_model(model)
    body = {"temperature": temp, "max_tokens": tokens, "seed": _SEED}
    spoken: dict[str, dict[str, list[_Spoken]]] = {}
    with ExitStack() as stack:
        options = paceline.ModelOptions(path, model_defaults=False, exact=exact)
        ours = stack.enter_context(paceline.load(options, remember=False))
        server = ServerProcess(stack, program, path)
        sides: dict[str, _Side] = {
            OURS: lambda one: _ours(ours, one, temp, tokens, speculate=True),
            SERVER: lambda one: _theirs(server, one, body),
            PLAIN: lambda one: _ours(ours, one, temp, tokens, speculate=False),
            NGRAM: lambda one: _ngram(program, path, one, body),
        }
        with progress_bar() as bar:
            for _ in range(repeats):
                for conversation in bar.track(CONVERSATIONS, description="conversations"):
                    for name, side in sides.items():
                        spoken.setdefault(conversation.name, {}).setdefault(name, []).append(side(conversation))
    _print(path, temp, spoken)
    facts = {
        name: {
            side: [one._asdict() | {"texts": len("".join(one.texts))} for one in runs] for side, runs in found.items()
        }
        for name, found in spoken.items()
    }
    print(json.dumps({"machine": machine(), "chats": {"model": path.name, "temperature": temp, "speeds": facts}}))


def _print(path: Path, temp: float, spoken: dict[str, dict[str, list[_Spoken]]]) -> None:
    print(f"{path.name}, temperature {temp:g}; tokens a second, medians of {len(next(iter(spoken.values()))[OURS])}")
    print(f"{'conversation':14}{'copies':8}" + "".join(f"{name:>24}" for name in (OURS, PLAIN, SERVER, NGRAM)))
    for one in CONVERSATIONS:
        cells = "".join(f"{_median(spoken[one.name][name]):24.1f}" for name in (OURS, PLAIN, SERVER, NGRAM))
        print(f"{one.name:14}{'yes' if one.copies else 'no':8}{cells}")
    for over in (SERVER, NGRAM, PLAIN):
        for copies in (False, True):
            names = [one.name for one in CONVERSATIONS if one.copies is copies]
            ratios = [
                ours.speed / other.speed
                for name in names
                for ours, other in zip(spoken[name][OURS], spoken[name][over], strict=True)
            ]
            what = "that copy" if copies else "that do not"
            print(
                f"{OURS} over {over}, {len(names)} conversations {what}: {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
    same = sum(found[OURS][0].texts == found[PLAIN][0].texts for found in spoken.values())
    theirs = sum(found[PLAIN][0].texts == found[SERVER][0].texts for found in spoken.values())
    prompts = sum(
        ours.num_prompt == other.num_prompt
        for found in spoken.values()
        for ours, other in zip(found[PLAIN], found[SERVER], strict=True)
        if ours.texts == other.texts
    )
    print(
        f"texts: {same} of {len(spoken)} as without drafts; {theirs} of {len(spoken)} plain ones as llama-server's; "
        f"{prompts} prompts of the same length after the same answers"
    )


def _median(runs: list[_Spoken]) -> float:
    return statistics.median(one.speed for one in runs)


def _ours(model: paceline.Model, conversation: Conversation, temp: float, tokens: int, *, speculate: bool) -> _Spoken:
    _run_in(model)
    messages: list[dict[str, Any]] = []
    total, seconds, texts, num_prompt = 0, 0.0, [], 0
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        reply = model.chat(messages, temperature=temp, seed=_SEED, max_tokens=tokens, speculate=speculate)
        messages.append(reply.message)
        total += reply.generation.stats.predicted_tokens - 1
        seconds += reply.generation.stats.decode_s
        texts.append(reply.text)
        num_prompt = len(reply.prompt.token_ids)
    return _Spoken(total, seconds, texts, num_prompt)


def _run_in(model: paceline.Model) -> None:
    """Decode until the cores have been looked at without the other side at work."""
    give_up_s = time.perf_counter() + _RUN_IN_S
    with model.stream("The", max_tokens=MAX_TOKENS, ignore_end=True, speculate=False, cache_prompt=False) as stream:
        for _ in stream.rounds():
            if time.perf_counter() > give_up_s:
                break


def _theirs(server: ServerProcess, conversation: Conversation, body: dict[str, Any]) -> _Spoken:
    messages: list[dict[str, Any]] = []
    total, seconds, texts, num_prompt = 0, 0.0, [], 0
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        said = server.post("/v1/chat/completions", {**body, "messages": messages})
        message, timings = said["choices"][0]["message"], said["timings"]
        messages.append({"role": "assistant", "content": message["content"]})
        # Its time runs from the first token on.
        total += timings["predicted_n"] - 1
        seconds += timings["predicted_ms"] / 1e3
        texts.append(message["content"])
        num_prompt = timings["prompt_n"] + timings["cache_n"]
    return _Spoken(total, seconds, texts, num_prompt)


def _ngram(program: Path, path: Path, conversation: Conversation, body: dict[str, Any]) -> _Spoken:
    with ExitStack() as stack:
        return _theirs(ServerProcess(stack, program, path, ("--spec-type", "ngram-mod")), conversation, body)
