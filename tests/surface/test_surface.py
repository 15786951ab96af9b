"""What users see, held to the files in ``golden``: reading their diff is the review of a change of the surface.

A change that is meant is written by ``SURFACE=write python -m pytest tests/surface``. Nothing of the machine is in
these files: no paths, times or numbers of threads.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final, is_typeddict

import pytest
import typer.main

import paceline
from paceline.cli.main import app
from paceline.cli.outputs import OPTIONAL_VALUE
from paceline.constraints import Gbnf, JsonSchema, Regex
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.server_options import ServerOptions
from tests.chat.conversing import CHATML
from tests.cli.invoking import Invoke, invoke
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.scripted import scripted_model

__all__ = ["invoke"]

GOLDEN: Final = Path(__file__).with_name("golden")
SHORT: Final = ("-p", "def f(x):", "-n", "8", "-t", "1", "--temp", "0", "--seed", "1", "--draft-max", "2")


def hold(name: str, text: str) -> None:
    """Check that a surface is what its file says, or write the file."""
    file = GOLDEN / name
    text = text.rstrip("\n") + "\n"
    if os.environ.get("SURFACE") == "write":
        file.write_text(text, encoding="utf-8")
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if text != before:
        lines = difflib.unified_diff(before.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="", n=1)
        pytest.fail("\n".join(lines), pytrace=False)


# The command line


def commands(command: Any, name: str) -> Iterator[str]:
    yield name
    for word, further in getattr(command, "commands", {}).items():
        yield from commands(further, f"{name} {word}")


def test_help(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Invoke, "COLUMNS", "80")
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "")  # else it is the name of what runs the tests
    pages = []
    for name in commands(typer.main.get_command(app), "paceline"):
        for asked in ("--help", "--help-all")[: 1 + ("--help-all" in invoke(*name.split()[1:], "--help").out)]:
            status, out, err = invoke(*name.split()[1:], asked)
            assert (status, err) == (0, "")
            pages.append("\n".join([f"$ {name} {asked}", *(line.rstrip() for line in out.splitlines())]))
    hold("help.txt", "\n".join(pages))


def key_paths(value: Any, at: str = "") -> set[str]:
    """Return where the leaves of a JSON value are."""
    if isinstance(value, dict) and value:
        return set().union(*(key_paths(inner, f"{at}.{key}" if at else key) for key, inner in value.items()))
    if isinstance(value, list) and value:
        return set().union(*(key_paths(inner, f"{at}[]") for inner in value))
    return {at}


def of_each(answers: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{asked}\n" + "".join(f"  {path}\n" for path in sorted(key_paths(answers[asked]))) for asked in answers
    )


def test_json_of_commands(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("template").write_text(CHATML)
    answers = {}
    for words in (
        ("models", "--json"),
        ("models", "show", "target", "--json"),
        ("convert", "draft", "folder", "--json"),
        ("run", *SHORT, "--json"),
        ("run", *SHORT[:-2], "--json", "--no-speculation"),
        ("run", *SHORT, "--json", "--compare", "--repeats", "1"),
        ("run", *SHORT, "--json", "--chat", "--chat-template-file", "template"),
    ):
        status, out, err = invoke(*words)
        assert status == 0, err
        facts = answers[" ".join(["paceline", *words])] = json.loads(out)
        if "machine" in facts:
            facts["machine"] = {"threads": facts["machine"]["threads"]}
    hold("json_of_commands.txt", of_each(answers))


SWITCHES: Final = Path(__file__).parents[2] / "docs" / "guides" / "switches.md"
COMMON: Final = (
    *("--json", "--html", "--seed", "--tokens", "--temp", "--repeats", "--prompts", "--sample", "--threads"),
    *("--ctx-size", "--model", "--model-draft", "--hf-repo", "--hf-repo-draft", "--gpu-layers", "--drafters"),
    *("--policy", "--remember", "--no-speculation", "--budget-s", "--type", "--force", "--output", "--verbose"),
)
"""Switches that several commands have, or that mean the same as in one."""


def test_the_table_of_switches_is_that_of_the_commands() -> None:
    options: dict[str, dict[str, Any]] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        shown = [each for each in command.params if not getattr(each, "hidden", False)]
        if name != "help":
            options[name] = {flag: each for each in shown for flag in (*each.opts, *each.secondary_opts)}
    lines = [f"| | {' | '.join(options)} |", "|---|" + "---|" * len(options)]
    for switch in COMMON:
        found = [of[switch] for of in options.values() if switch in of]
        names = ", ".join(
            sorted(set.intersection(*({*each.opts} for each in found)), key=lambda name: (len(name), name))
        )
        value = OPTIONAL_VALUE if any(each.metavar == OPTIONAL_VALUE for each in found) else ""
        cells = ["yes" if switch in of else "" for of in options.values()]
        lines.append(f"| `{names}{value}` | {' | '.join(cells)} |")
    begin, table, end = re.split(r"(?s)(?<=<!-- switches -->\n)(.*)(?=<!-- end -->)", SWITCHES.read_text())
    if os.environ.get("SURFACE") == "write":
        table = "\n".join([*lines, ""])
        SWITCHES.write_text(begin + table + end)
    assert table.splitlines() == lines


# Python


def signature(name: str, function: Any) -> str:
    """Return a signature, with a parameter a line where there are many."""
    made = inspect.signature(function)
    text = f"{name}{made}"
    if len(text) <= 120:
        return text
    return f"{name}(" + "".join(f"\n      {parameter}" for parameter in made.parameters.values()) + ")"


def members(kind: type) -> Iterator[str]:
    """Yield what a class has that users may know, whichever class of ours it comes from."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found |= vars(base) if base.__module__.startswith("paceline") else {}
    for name, value in found.items():
        function = getattr(value, "__func__", value)
        if name.startswith("_") or isinstance(value, classmethod):
            continue
        if isinstance(value, property):
            yield f"{name}: {inspect.signature(value.fget).return_annotation if value.fget else None}"
        elif inspect.isfunction(function):
            yield signature(f"{'async ' if inspect.iscoroutinefunction(function) else ''}{name}", function)


def interpreted(value: Any) -> Any:
    """Return a class as Python has it: of one that is compiled no signatures are to be had."""
    module = sys.modules[value.__module__]
    path = Path(module.__file__ or "").with_name(module.__name__.rpartition(".")[2] + ".py")
    if module.__file__ == str(path):
        return value
    spec = spec_from_file_location(module.__name__, path)
    assert spec is not None
    assert spec.loader is not None
    source = module_from_spec(spec)
    spec.loader.exec_module(source)
    return getattr(source, value.__name__)


def described(name: str) -> Iterator[str]:
    value = getattr(paceline, name)
    if not isinstance(value, type):
        yield signature(name, value) if inspect.isfunction(value) else f"{name} = {value!r}"
        return
    value = interpreted(value)
    yield f"class {name}({', '.join(base.__name__ for base in value.__bases__ if base is not object)})"
    if is_typeddict(value):
        yield from (f"  {key}: {getattr(hint, '__forward_arg__', hint)}" for key, hint in value.__annotations__.items())
    elif not issubclass(value, Exception):
        # Streams are made by models alone, of parts that nobody else has.
        if not getattr(value, "_is_protocol", False) and not name.endswith("Stream"):
            yield f"  {signature('', value)}"
        yield from (f"  {member}" for member in members(value))


def test_python() -> None:
    text = "\n".join(line for name in paceline.__all__ for line in described(name))
    hold("python.txt", re.sub(r" at 0x[0-9a-f]+", "", text))


# The server


@pytest.fixture(scope="module")
def server() -> Iterator[Hosted]:
    """A server that nobody else asked anything, whose metrics are those of this module's requests alone."""
    with hosted(scripted, ServerOptions(metrics=True)) as running:
        yield running


def test_openapi(server: Hosted) -> None:
    hold("openapi.json", json.dumps(server.get("/openapi.json").json(), indent=1))


def test_metrics(server: Hosted) -> None:
    server.answer("/completion", {"prompt": "abc", "n_predict": 20, "seed": 7})
    openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
    seen: dict[str, None] = {}
    for headers in ({}, openmetrics):
        for line in server.get("/metrics", headers=headers).text.splitlines():
            seen[line if line.startswith("#") else line.rpartition(" ")[0]] = None
    hold("metrics.txt", "\n".join(seen))


# Errors by kind

COMMAND_LINES: Final = (
    "frobnicate",
    "run --temprature 1",
    "run --temp hot",
    "run --temp -1",
    "run --top-p 2",
    "run --min-p 1.5",
    "run --repeat-penalty 0",
    "run -n -2",
    "run -n 1.5",
    "run --verify some",
    "run --policy best",
    "run --draft-max -1",
    "run --draft-max 2 --policy auto",
    "run --drafters suffix,magic -p x",
    "run -m nowhere.gguf -p x",
    "run -m broken.gguf -p x",
    "run -md nowhere.gguf -p x",
    "run -m a.gguf -hf some/model -p x",
    "run -c 10000000 -p x",
    "run -f nowhere.txt",
    "run -p x -f prompt.txt",
    "run --json-schema {",
    "run -p x --grammar-file nowhere.gbnf",
    "run -p x --repeats 0",
    "run -p x --chat",
    "run -p x --logit-bias a",
    "run -p x --samplers magic",
    "chat -m nowhere",
    "serve --port 700000",
    "serve --port x",
    "serve --api-key-file nowhere",
    "serve --ssl-key-file key.pem",
    "profile --widths 0",
    "bench --kinds poems",
    "inflate huge",
    "convert nowhere there",
    "doctor",
    "models show nowhere",
    "models remove target",
)

VARIABLES: Final = (
    ("PACELINE_TEMPERATURE", "hot"),
    ("PACELINE_TEMPERATURE", "-1"),
    ("PACELINE_TOP_K", "1.5"),
    ("PACELINE_MAX_TOKENS", "-2"),
    ("PACELINE_VERIFY", "some"),
    ("PACELINE_CONTEXT_LENGTH", "-1"),
    ("PACELINE_DRAFT_GPU_LAYERS", "all"),
    ("PACELINE_HF_REPO", "model"),
    ("PACELINE_REASONING", "maybe"),
    ("PACELINE_PORT", "700000"),
)

OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": "hot"},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temprature": 1},
    {"top_k": 1.5},
    {"top_p": 2},
    {"max_tokens": -1},
    {"stop": [""]},
    {"stop": 5},
    {"seed": 2**64},
    {"order": ["magic"]},
    {"logit_bias": {-1: 2.0}},
    {"drafters": ["magic"]},
    {"verify": "some"},
    {"policy": "best"},
    {"draft_max": -1},
    {"logprobs": -1},
    {"preserved_ids": [10**6]},
    {"constraint": JsonSchema({"type": "nothing"})},
    {"constraint": Gbnf("root")},
    {"constraint": Regex("(")},
)

CALLS: Final[dict[str, Callable[[], object]]] = {
    "load nowhere": lambda: paceline.load("nowhere.gguf"),
    "load policy": lambda: paceline.load(policy="best"),
    "load drafters": lambda: paceline.load(drafters=["magic"]),
    "load context_length": lambda: paceline.load(context_length=0),
    "ModelOptions": lambda: paceline.ModelOptions("a.gguf", max_sequences=0),
    "DraftOptions": lambda: paceline.DraftOptions("a.gguf", vocab="some"),  # type: ignore[arg-type]
    "ChatParams": lambda: paceline.ChatParams(reasoning="maybe"),  # type: ignore[arg-type]
    "FixedPolicy": lambda: paceline.FixedPolicy(-1),
    "from_hub": lambda: paceline.from_hub("model"),
}

PROMPTS: Final[tuple[Any, ...]] = ("", [], [10**6], [1.5], 5, "x" * 5000)

CHAT: Final = {"messages": [{"role": "user", "content": "abc"}]}
BODIES: Final[tuple[tuple[str, Any], ...]] = (
    ("/nowhere", {}),
    ("/completion", []),
    ("/completion", {}),
    ("/completion", {"prompt": 5}),
    ("/completion", {"prompt": "x" * 5000}),
    ("/completion", {"prompt": "x", "temperature": "hot"}),
    ("/completion", {"prompt": "x", "temperature": -1}),
    ("/completion", {"prompt": "x", "top_p": 2}),
    ("/completion", {"prompt": "x", "n_predict": 1.5}),
    ("/completion", {"prompt": "x", "stop": [5]}),
    ("/completion", {"prompt": "x", "samplers": ["magic"]}),
    ("/completion", {"prompt": "x", "mirostat": 2}),
    ("/completion", {"prompt": "x", "grammar": "root"}),
    ("/completion", {"prompt": "x", "json_schema": {"type": "nothing"}}),
    ("/completion", {"prompt": "x", "logit_bias": [[-1, 2]]}),
    ("/completion", {"prompt": "x", "speculative.n_max": -1}),
    ("/v1/completions", {"prompt": "x", "n": 0}),
    ("/v1/completions", {"prompt": "x", "logprobs": 2000}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "poem"}}),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": "yes"}}),
    ("/v1/responses", {}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
    ("/v1/responses", {"input": "x", "max_output_tokens": -2}),
    ("/tokenize", {"content": 5}),
    ("/detokenize", {"tokens": [10**6]}),
    ("/v1/embeddings", {"input": "x"}),
)


def raised(call: Callable[..., object], *values: Any, **options: Any) -> str:
    try:
        call(*values, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_errors(server: Hosted, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.gguf").write_text("GGUF no more")
    Path("prompt.txt").write_text("x")
    lines = []

    def note(asked: str, said: str) -> None:
        lines.append(f"{asked}\n    {said}")

    for words in COMMAND_LINES:
        status, out, err = invoke(*words.split())
        note(f"paceline {words}", f"{status} {out}{err.strip()}")
    for name, value in VARIABLES:
        note(f"{name}={value}", raised(paceline.from_environment, {name: value}))
    with scripted_model() as model:
        for options in OPTIONS:
            note(f"generate({options})", raised(model.generate, "abc", **options))
        for prompt in PROMPTS:
            note(f"generate({prompt!r:.60})", raised(model.generate, prompt))
    for name, call in CALLS.items():
        note(name, raised(call))
    for path, body in BODIES:
        response = server.post(path, body)
        error = response.json()["error"]
        note(f"POST {path} {json.dumps(body):.100}", f"{response.status_code} {error.pop('type')} {error}")
    hold("errors.txt", "\n".join(lines))


# Seeds


CODE: Final = "ise ValueError()\n            __len__ = __bool__\n        with"
PROSE: Final = "The parser reads the file and"
SCHEMA: Final = JsonSchema({"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}})
PENALTIES: Final = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "penalty_last_n": 32}
# Prompts and seeds whose texts stay as they are where every logit is some hundredths off, as on another processor.
SEEDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"prompt": CODE, "temperature": 0},
    "greedy, plainly": {"prompt": CODE, "temperature": 0, "speculate": False},
    "sampled": {"prompt": PROSE, "seed": 14},
    "sampled, plainly": {"prompt": PROSE, "seed": 14, "speculate": False},
    "hot": {"prompt": "def read_lines(path):", "seed": 5, "temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "narrow": {"prompt": PROSE, "seed": 45, "top_k": 5, "top_p": 0.8},
    "penalties": {"prompt": PROSE, "seed": 64, **PENALTIES},
    "penalties, greedily": {
        "prompt": "w to do basic remote method calls, but provided no\nfacilitie",
        "temperature": 0,
        **PENALTIES,
    },
    "bias": {"prompt": PROSE, "seed": 39, "logit_bias": {32: -math.inf, 10: 4.0}},
    "schema": {"prompt": "Record: ", "seed": 1, "constraint": SCHEMA},
    "stop": {"prompt": PROSE, "seed": 44, "stop": ["need to", "``\n"]},
    "lookup": {
        "prompt": "a, b, c, d, a, b, c, d, a, b,",
        "temperature": 0,
        "drafters": ["suffix", "lookup"],
        "max_tokens": 8,
    },
    "rejection": {"prompt": PROSE, "seed": 154, "verify": "rejection", "max_tokens": 8},
}


def said(generation: paceline.Generation) -> str:
    return f"    {list(generation.token_ids)}\n    {generation.finish_reason}: {generation.text!r}"


def test_seeds() -> None:
    options: dict[str, Any] = {"context_length": 256, "max_sequences": 4, "threads": 1, "flash_attention": False}
    target, draft = (paceline.ModelOptions(path(), **options) for path in (embedded_target, embedded_draft))
    lines = []
    with paceline.load(
        target, draft=draft, drafters=["suffix", "lookup", "draft"], policy=paceline.FixedPolicy(4)
    ) as model:
        for name, asked in SEEDS.items():
            lines += [name, said(model.generate(**{"max_tokens": 14, **asked}))]
        for one in model.choices(PROSE, 3, seed=7, max_tokens=8):
            lines += ["choices", said(one)]
    hold("seeds.txt", "\n".join(lines))
