"""Pairs: the same request to two servers, and whether the answers are alike in all but their text."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.parity.servers import Server
from tests.timing import WAIT_S

# Characters of a request's body that a report shows.
SHOWN = 200

# Fields whose values say nothing of what the model wrote: they must be equal.
EQUAL = frozenset(
    {
        "object",
        "role",
        "code",
        "type",
        "model",
        "prompt",
        "n_ctx",
        "total_slots",
        "seed",
        "n_probs",
        "n_predict",
        "total",
    }
    | {"n_saved", "n_restored", "n_erased", "id_slot"}
    | {"prompt_tokens", "tokens_evaluated", "n_prompt_tokens", "input_tokens"}
)
# Lists as long as the text is, or as many as there are words that can come next.
AS_LONG_AS_THE_TEXT = frozenset({"tokens", "bytes", "content", "completion_probabilities", "top_probs"})


@dataclass(frozen=True)
class Start:
    """A server that a case started, and what was asked of it.

    Attributes:
        case: the case's name.
        flags: the server's flags, as the launcher made them.
        requests: for each request its method, path, headers and body, the body in Base64.
    """

    case: str
    flags: list[str]
    requests: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        status: the HTTP status.
        kind: the content type, without parameters.
        body: the JSON or the text; for a stream the list of its events.
    """

    status: int
    kind: str
    body: Any


def read(record: Path) -> list[Start]:
    """Return what was recorded, without servers of which nothing was asked."""
    starts: list[Start] = []
    case = ""
    for line in map(json.loads, record.read_text().splitlines()):
        if "case" in line:
            case = line["case"]
        elif "flags" in line:
            starts.append(Start(case, line["flags"]))
        else:
            starts[-1].requests.append(line)
    return [start for start in starts if start.requests]


def get(path: str) -> dict[str, Any]:
    """Return a request for what is at ``path``."""
    return {"method": "GET", "path": path, "headers": {}, "body": ""}


def post(path: str, *, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    """Return a request that posts the fields of ``body`` as JSON."""
    content = base64.b64encode(json.dumps(body).encode()).decode()
    return {
        "method": "POST",
        "path": path,
        "headers": {"content-type": "application/json", **(headers or {})},
        "body": content,
    }


def compare(starts: Sequence[Start], servers: Sequence[Server], model: Path, folder: Path) -> list[dict[str, Any]]:
    """Ask every server what was recorded, and compare the answers of each with those of the first.

    Args:
        starts: what was recorded.
        servers: the first is the reference.
        model: the GGUF that stands for every text model.
        folder: where the servers run: paths in flags are relative to it.

    Returns:
        For each request and each server but the first: ``case``, ``server``, ``request`` and ``differences``.
    """
    results = []
    for start in starts:
        with ExitStack() as stack:
            ports = [stack.enter_context(server.running(start.flags, model, folder)) for server in servers]
            for request in start.requests:
                first, *others = [_ask(port, request) for port in ports]
                results += [
                    {
                        "case": start.case,
                        "server": server.name,
                        "request": _words(request),
                        "differences": differences(first, answer),
                    }
                    for server, answer in zip(servers[1:], others, strict=True)
                ]
    return results


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return lines of text: how many pairs are alike, and each difference with the first request that shows it."""
    lines = [f"pairs: {len(results)}, alike: {sum(not result['differences'] for result in results)}"]
    shown: dict[str, list[str]] = {}
    for result in results:
        for text in result["differences"]:
            shown.setdefault(f"{result['server']}: {text}", []).append(f"{result['case']}: {result['request']}")
    lines += [f"  {len(requests)} x {text}\n      {requests[0]}" for text, requests in shown.items()]
    return "\n".join(lines)


def differences(reference: Answer, other: Answer) -> list[str]:
    """Return where ``other`` is not like ``reference``, in words, each with the path of the field.

    Fields that only ``other`` has are allowed: a client of the reference does not look for them.
    """
    if reference.status >= 500 > other.status:
        return []  # it says nothing of what was asked
    if reference.status != other.status:
        return [f"status: {reference.status} became {other.status}"]
    found = [] if reference.kind == other.kind else [f"content type: {reference.kind} became {other.kind}"]
    if reference.kind == other.kind == "text/event-stream":
        return found + _stream_differences(reference.body, other.body)
    if isinstance(reference.body, str) and reference.body.startswith("# HELP"):
        missing = _metric_names(reference.body) - _metric_names(str(other.body))
        return found + [f"{name}: missing" for name in sorted(missing)]
    return found + _value_differences("", "", reference.body, other.body)


def _value_differences(path: str, name: str, reference: Any, other: Any) -> list[str]:
    if name == "content" and not reference and not other:
        return []  # an answer that is calls alone: OpenAI's API has null, llama-server the empty text
    if _type(reference) != _type(other):
        return [f"{path or 'body'}: {_type(reference)} became {_type(other)}"]
    found = []
    if isinstance(reference, dict):
        reference, other = _with_cached(reference), _with_cached(other)
        for key, value in reference.items():
            place = f"{path}.{key}" if path else key
            found += _value_differences(place, key, value, other[key]) if key in other else [f"{place}: missing"]
    elif isinstance(reference, list):
        if len(reference) != len(other) and name not in AS_LONG_AS_THE_TEXT:
            return [f"{path}: {len(reference)} items became {len(other)}"]
        for place, (one, same) in enumerate(zip(reference, other, strict=False)):
            found += _value_differences(f"{path}[{place}]", "", one, same)
    elif name in EQUAL and reference != other:
        found = [f"{path}: {_where_they_part(reference, other)}"]
    return found


def _with_cached(value: dict[str, Any]) -> dict[str, Any]:
    """Return counts of Anthropic's form with all of the prompt: what is in the cache is each server's own matter."""
    if "cache_read_input_tokens" not in value:
        return value
    return {**value, "input_tokens": value["input_tokens"] + value["cache_read_input_tokens"]}


def _where_they_part(reference: Any, other: Any) -> str:
    """Return two values in words; of long texts what stands where they begin to differ."""
    if isinstance(reference, str) and isinstance(other, str) and len(reference) > SHOWN:
        pairs = enumerate(zip(reference, other, strict=False))
        same = next((at for at, (one, another) in pairs if one != another), min(len(reference), len(other)))
        start = max(0, same - SHOWN // 10)
        reference, other = (f"...{text[start : start + SHOWN]}..." for text in (reference, other))
    return f"{reference!r} became {other!r}"


def _stream_differences(reference: Sequence[Any], other: Sequence[Any]) -> list[str]:
    """Compare the kinds of events in their order, but for those that keep a silent stream open.

    How many of a kind follow each other depends on the text, unless they tell of the prompt.
    """
    without_pings = ([event for event in events if _kind(event) != "ping"] for events in (reference, other))
    first, second = ([list(run) for _, run in groupby(events, _kind)] for events in without_pings)
    kinds, others = ([_kind(run[0]) for run in runs] for runs in (first, second))
    if kinds != others:
        return [f"events: {kinds} became {others}"]
    found = []
    for kind, run, same in zip(kinds, first, second, strict=True):
        if "prompt_progress" in kind and len(run) != len(same):
            found.append(f"events with prompt_progress: {len(run)} became {len(same)}")
        found += _value_differences(f"event ({kind})", "", run[0], same[0])
    return found


def _kind(event: Any) -> str:
    """Return what an event is for, by the fields that say so."""
    if not isinstance(event, dict):
        return str(event)
    if "choices" not in event and "stop" not in event and "type" in event:
        # Of an API whose events have names.
        return f"{event['type']} prompt_progress" if "prompt_progress" in event else str(event["type"])
    words = [key for key in ("error", "prompt_progress", "usage", "timings") if key in event]
    if "stop" in event:
        words.append("last" if event["stop"] else "text")
    for choice in event.get("choices", []):
        words += sorted(choice.get("delta", {"text": ""}))
        words += ["finish_reason"] if choice.get("finish_reason") else []
    return " ".join(words)


def _metric_names(text: str) -> set[str]:
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}


def _type(value: Any) -> str:
    """Return the name of a JSON type."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return {int: "number", float: "number", str: "string", list: "array", dict: "object"}[type(value)]


def _words(request: Mapping[str, Any]) -> str:
    """Return a request as a line of text, with the end of a long body left out."""
    body = base64.b64decode(request["body"]).decode()
    return f"{request['method']} {request['path']} {body if len(body) <= SHOWN else body[:SHOWN] + '...'}"


def _ask(port: int, request: Mapping[str, Any]) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        body = base64.b64decode(request["body"])
        connection.request(request["method"], request["path"], body=body or None, headers=request["headers"])
        response = connection.getresponse()
        kind = response.headers.get_content_type()
        text = response.read().decode()
    finally:
        connection.close()
    if kind == "text/event-stream":
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return Answer(response.status, kind, [event if event == "[DONE]" else json.loads(event) for event in events])
    return Answer(response.status, kind, json.loads(text) if kind == "application/json" else text)
