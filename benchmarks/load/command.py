"""Load for any server that speaks OpenAI's API, for a gateway, or for several of them in turn.

aiperf and guidellm load servers too, and do more. They need an environment of their own and the model's tokenizer from
a hub, and neither sets the tokens that were read beside those that had to be.

What is asked: prompts of real text, of which many begin alike, as behind one system prompt or in one conversation.
When: so many clients at once, each of which asks again once it has its answer (a closed loop); or so many requests a
second, whatever the server does (an open loop), which is what users do and what shows a queue. What is measured:

* Lost: requests without a whole answer, with the reasons.
* Tokens a second: those of whole answers, over the time from the first request to the end of the last one.
* First token: from the sending of a request to the first text. Gap: between two arrivals of text at a client. What a
  server says at once is one arrival, so with drafts gaps are longer and fewer.
* Prompt tokens read: those of whole answers but for what the server says it had cached; and the least possible, which
  one server would read that forgets nothing. Over the least is what spreading, forgetting and reading at once cost.

What limits the figures is this process where servers say a lot: it reads all streams on one core, which is the server's
own where both are on one machine. *Late* is how long after their time requests of an open loop were sent.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import httpx
import typer

from benchmarks.load.asking import APIS, SILENT_S, Asked, Reply, ask_all, client, percentiles
from benchmarks.load.traffic import Prompts, least_read, sending_times
from benchmarks.reporting import JsonOption, as_line, console, progress_bar, table, write_figures
from paceline.core.errors import EngineError, InputError
from paceline.models.embedded import HELDOUT_KINDS

EPILOG = """[bold]Examples[/bold]

python -m benchmarks load http://127.0.0.1:8080

python -m benchmarks load http://127.0.0.1:8080 --requests 500 --rate 4 --burstiness 0.3

python -m benchmarks load http://127.0.0.1:8081 http://127.0.0.1:8082  [dim]# each gets every second request[/dim]

PACELINE_API_KEY=... python -m benchmarks load https://models.example.org --api chat --model mine --json load.json
"""

KEY: Final = "PACELINE_API_KEY"
_CLIENTS: Final = 8
_SHOWN: Final = (0.5, 0.99)
_REASON_CHARACTERS: Final = 200
_ASKING_S: Final = 30.0
"""Longest that a server may take to name its model, or to turn a prompt into tokens."""


def load(
    urls: Annotated[list[str], typer.Argument(metavar="URL", help="Addresses, with /v1 or without.")],
    requests: Annotated[int, typer.Option("--requests", help="Requests, over all addresses in turn.", min=1)] = 64,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Requests at once; each end begins another. \\[8]", min=1)
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second, however many are under way by then.")
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option("--burstiness", help="Of --rate: 1 is Poisson, less comes in bursts, more is more even. \\[1]"),
    ] = None,
    prefixes: Annotated[int, typer.Option("--prefixes", help="Beginnings that prompts share.", min=1)] = 8,
    prefix_words: Annotated[int, typer.Option("--prefix-words", help="Words of a beginning.", min=0)] = 200,
    own_words: Annotated[int, typer.Option("--own-words", help="Words of each prompt's own.", min=1)] = 20,
    text: Annotated[str, typer.Option("--text", help=f"What prompts are of: {', '.join(HELDOUT_KINDS)}.")] = "code",
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Most tokens of an answer.", min=1)] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Have every answer be that long, where the server can.")
    ] = False,
    temp: Annotated[
        float | None, typer.Option("--temp", "--temperature", help="0 decodes greedily. \\[the server's]", min=0.0)
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Another one makes other prompts, which no server has read before.", min=0)
    ] = 1,
    api: Annotated[str, typer.Option("--api", help=f"How to ask: {', '.join(APIS)}.")] = "completions",
    model: Annotated[
        str | None, typer.Option("--model", help="Its name in requests. \\[what /v1/models lists]")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="URL", help="A server whose /tokenize counts the least. \\[the first URL]"),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds of silence after which a request is lost.", min=0.1)
    ] = SILENT_S,
    json_file: JsonOption = None,
) -> None:
    """Load any OpenAI server, gateway or several servers, and say what was lost, how fast, and what had to be read.

    A key is taken from PACELINE_API_KEY. The exit status is 1 where requests were lost.
    """
    servers = [_address(url) for url in urls]
    if api not in APIS:
        raise InputError(f"--api {api}: choose from {', '.join(APIS)}")
    if text not in HELDOUT_KINDS:
        raise InputError(f"--text {text}: choose from {', '.join(HELDOUT_KINDS)}")
    if prefixes > requests:
        raise InputError(f"--prefixes {prefixes}: {requests} requests have at most as many; ask for more by --requests")
    if rate is None:
        if burstiness is not None:
            raise InputError("--burstiness is of --rate: give one, or leave it out")
        concurrency = concurrency or _CLIENTS
        due_s = [0.0] * requests
    else:
        if concurrency is not None:
            raise InputError("--concurrency and --rate exclude each other: give clients at once, or requests a second")
        for name, value in (("--rate", rate), ("--burstiness", 1.0 if burstiness is None else burstiness)):
            if not 0 < value < float("inf"):
                raise InputError(f"{name} {value:g}: give a number above 0")
        due_s = sending_times(requests, rate, 1.0 if burstiness is None else burstiness, seed)
    key = os.environ.get(KEY, "").partition(",")[0].strip()
    name = asyncio.run(_model_name(servers[0], key)) if model is None else model
    prompts = Prompts(requests, prefixes, prefix_words, own_words, text, seed).texts()
    also: dict[str, Any] = {"model": name, "stream": True}
    if ignore_eos:
        also["ignore_eos"] = True
    if temp is not None:
        also["temperature"] = temp
    asked = [
        Asked(servers[number % len(servers)], {**APIS[api].asks(prompt, max_tokens), **also, "seed": seed + number}, at)
        for number, (prompt, at) in enumerate(zip(prompts, due_s, strict=True))
    ]
    counts_at = servers[0] if tokenizer is None else _address(tokenizer)
    with progress_bar() as bar:
        asking = _tokens(counts_at, bar.track(prompts, description="tokens"), key, name, is_chat=api == "chat")
        tokens = asyncio.run(asking)
        if tokens is None and tokenizer is not None:
            raise InputError(f"--tokenizer {tokenizer}: no token comes from {counts_at}/tokenize")
        task = bar.add_task("answers", total=requests)
        lost = 0

        def when_over(reply: Reply) -> None:
            nonlocal lost
            lost += bool(reply.errors)
            bar.update(task, advance=1, description=f"answers, {lost} lost" if lost else "answers")

        clients = None if rate is not None else concurrency
        wall_s = asyncio.run(ask_all(APIS[api], asked, clients=clients, silent_s=timeout, key=key, when_over=when_over))
    least = None
    if tokens is not None:
        least = least_read(of for of, each in zip(tokens, asked, strict=True) if not each.reply.errors)
    found = {
        "requests": requests,
        "concurrency": concurrency,
        "rate": rate,
        "burstiness": burstiness,
        "prefixes": prefixes,
        "prefix_words": prefix_words,
        "own_words": own_words,
        "text": text,
        "max_tokens": max_tokens,
        "seed": seed,
        "api": api,
        "model": name,
        "late_s": None if rate is None else percentiles([each.reply.sent_s - each.reply.due_s for each in asked]),
        "all": figures(asked, wall_s, least),
        "by_url": {url: figures([each for each in asked if each.server == url], wall_s) for url in servers},
    }
    _print(found)
    print(as_line("load", found))
    write_figures("load", found, json_file)
    if lost:
        raise EngineError(f"{lost} of {requests} requests were lost")


def figures(asked: Sequence[Asked], wall_s: float, least: int | None = None) -> dict[str, Any]:
    """Return what is reported of requests.

    Args:
        asked: the requests, all of them over.
        wall_s: seconds that all of the load took.
        least: tokens that had to be read of the prompts of whole answers; None where nobody knows.
    """
    replies = [each.reply for each in asked]
    whole = [reply for reply in replies if not reply.errors]
    said = [reply for reply in whole if reply.arrivals]
    gaps_s = [gap for reply in said for gap in reply.gaps_s]
    read = None
    if whole and all(reply.cached_tokens is not None for reply in whole):
        read = sum(reply.prompt_tokens - (reply.cached_tokens or 0) for reply in whole)
    return {
        "requests": len(asked),
        "lost": len(asked) - len(whole),
        "lost_after_their_first_token": sum(bool(reply.errors and reply.arrivals) for reply in replies),
        "reasons": dict(Counter("; ".join(reply.errors) for reply in replies if reply.errors).most_common()),
        "wall_s": wall_s,
        "tokens": sum(reply.tokens for reply in whole),
        "tokens_per_second": sum(reply.tokens for reply in whole) / wall_s,
        "first_token_s": percentiles([reply.first_s for reply in said]) if said else {},
        "gap_s": percentiles(gaps_s) if gaps_s else {},
        "prompt_tokens": sum(reply.prompt_tokens for reply in whole),
        "prompt_tokens_read": read,
        "prompt_tokens_least": least,
    }


def _print(found: Mapping[str, Any]) -> None:
    how = f"{found['concurrency']} at once" if found["rate"] is None else f"{found['rate']:g} a second"
    print(
        f"{found['requests']} requests to {found['model']}, {how}; {found['prefixes']} beginnings of "
        f"{found['prefix_words']} words, answers of at most {found['max_tokens']} tokens; times are milliseconds"
    )
    times = [f"{what} p{100 * share:.0f}" for what in ("first", "gap") for share in _SHOWN]
    made = table("", "server", "requests", "lost", "tokens/s", *times, "prompt tokens", "read", "least")
    by_url, everything = found["by_url"], found["all"]
    lines = {**by_url, "all": everything} if len(by_url) > 1 else dict.fromkeys(by_url, everything)
    for name, of in lines.items():
        shown = [of[kind].get(f"p{100 * share:.0f}") for kind in ("first_token_s", "gap_s") for share in _SHOWN]
        cells = ["-" if seconds is None else f"{1e3 * seconds:.0f}" for seconds in shown]
        counts = (of["prompt_tokens"], of["prompt_tokens_read"], of["prompt_tokens_least"])
        cells += ["-" if count is None else str(count) for count in counts]
        made.add_row(name, str(of["requests"]), str(of["lost"]), f"{of['tokens_per_second']:.1f}", *cells)
    console().print(made)
    if found["late_s"] is not None:
        print(f"late p99: {1e3 * found['late_s']['p99']:.0f}")
    read, least = everything["prompt_tokens_read"], everything["prompt_tokens_least"]
    if read is not None and least:
        print(f"prompt tokens read: {read / least:.2f} of the least possible")
    for reason, count in everything["reasons"].items():
        print(f"{count} lost: {' '.join(reason.split())[:_REASON_CHARACTERS]}")


def _address(url: str) -> str:
    """Return what paths are added to."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"{url} is no address of a server: give one such as http://127.0.0.1:8080")
    return url.rstrip("/").removesuffix("/v1")


async def _model_name(server: str, key: str) -> str:
    """Return what a server calls its model.

    Raises:
        EngineError: if it does not say.
        InputError: if it has several models.
    """
    url = f"{server}/v1/models"
    try:
        async with client(_ASKING_S, key) as web:
            said = await web.get(url)
    except httpx.HTTPError as error:
        raise EngineError(
            f"{url} does not answer ({type(error).__name__}: {error}): start a server there, or give another address"
        ) from None
    if said.status_code == httpx.codes.UNAUTHORIZED:
        raise EngineError(f"{url} asks for a key: give one in the environment as {KEY}")
    try:
        names = [str(model["id"]) for model in said.raise_for_status().json()["data"]]
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):
        names = []
    if not names:
        raise EngineError(f"{url} lists no model (status {said.status_code}): name one by --model")
    if len(names) > 1:
        raise InputError(f"{url} lists {', '.join(names)}: choose one by --model")
    return names[0]


async def _tokens(
    server: str, prompts: Iterable[str], key: str, model: str, *, is_chat: bool
) -> list[list[int]] | None:
    """Return prompts as tokens, by a server that turns texts into them; None where it does not.

    llama-server's requests and paceline's: ``/tokenize``, and ``/apply-template`` before it for chats.
    """
    found = []
    try:
        async with client(_ASKING_S, key) as web:
            for prompt in prompts:
                content = prompt
                if is_chat:
                    body = {"messages": [{"role": "user", "content": prompt}], "model": model}
                    said = await web.post(f"{server}/apply-template", json=body)
                    content = said.raise_for_status().json()["prompt"]
                text = {"content": content, "add_special": True, "parse_special": is_chat, "model": model}
                said = await web.post(f"{server}/tokenize", json=text)
                found.append([int(token) for token in said.raise_for_status().json()["tokens"]])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None
    return found
