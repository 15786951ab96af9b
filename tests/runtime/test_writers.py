"""Only the loop writes a request: others would have to know what must hold of one between rounds.

What is read here is the program's text. A request is known by its name: ``request``, ``..._request``, an element of
``requests``, or what was assigned from a field of one in the same function.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.core.request import Request

ROOT = Path(__file__).parents[2]

WRITERS = ("src/paceline/runtime/", "src/paceline/core/request.py")
"""Who may write a request, and make one."""

DOUBLES = ("tests/helpers.py",)
"""Requests outside any loop, for testing what only reads them."""

MUTATORS = {
    "add", "append", "clear", "extend", "flush", "insert", "pop", "push", "push_control", "push_token", "remove",
    "reverse", "sort", "subtract", "update",
}  # fmt: skip

NAMED = re.compile(rf"requests?\b[^\n]*\.({'|'.join(Request.__slots__)})\b|\bRequest\(|\bsetattr\(")
"""What every text has that writes a request, or makes one."""

Chain = tuple[str, ...]


def chain_of(node: ast.expr, aliases: dict[str, Chain]) -> Chain:
    """Return the names of an expression such as ``turn.request.stats``, from the left; empty for any other."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, (node.id,))
    if isinstance(node, ast.Attribute):
        return (*chain_of(node.value, aliases), node.attr)
    if isinstance(node, ast.Subscript):
        return chain_of(node.value, aliases)
    return ()


def is_inside_request(chain: Chain) -> bool:
    """Return whether a chain names a field of a request, or something below one."""
    return any(
        (name in ("request", "requests") or name.endswith("_request")) and field in Request.__slots__
        for name, field in itertools.pairwise(chain)
    )


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement writes."""
    waiting: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        waiting = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        waiting = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        waiting = [node.func.value]
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        elif isinstance(target, ast.Starred):
            waiting.append(target.value)
        else:
            yield target


def aliases_in(nodes: Sequence[ast.AST]) -> dict[str, Chain]:
    """Return the names that stand for a field of a request in a function."""
    aliases: dict[str, Chain] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name) and isinstance(value, ast.Attribute):
                    chain = chain_of(value, {})
                    if is_inside_request(chain):
                        aliases[name.id] = chain
    return aliases


def scopes_of(tree: ast.Module) -> Iterator[list[ast.AST]]:
    """Yield the nodes of each function, those inside it included, and at last those outside all functions."""
    outside: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield list(ast.walk(node))
        else:
            outside.append(node)
            waiting += ast.iter_child_nodes(node)
    yield outside


def is_write(node: ast.AST, aliases: dict[str, Chain]) -> bool:
    """Return whether a statement or call writes a request, or makes one."""
    if isinstance(node, ast.Call):
        called = chain_of(node.func, {})
        if called == ("Request",):
            return True
        if called == ("setattr",):
            return is_inside_request((*chain_of(node.args[0], aliases), "id"))
    for target in targets_of(node):
        # A name alone is bound anew, and what it stood for stays as it was, but for += and methods.
        rebinds = isinstance(target, ast.Name) and not isinstance(node, ast.AugAssign | ast.Call)
        if not rebinds and is_inside_request(chain_of(target, aliases)):
            return True
    return False


def writes_in(text: str) -> list[str]:
    """Return the places where a program writes or makes a request, as ``line: code``."""
    found = []
    for nodes in scopes_of(ast.parse(text)):
        aliases = aliases_in(nodes)
        for node in nodes:
            if isinstance(node, ast.stmt | ast.expr) and is_write(node, aliases):
                found.append((node.lineno, ast.unparse(node)))
    return [f"{line}: {code}" for line, code in sorted(found)]


def modules() -> list[str]:
    paths = [path for folder in ("src/paceline", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    return [name for name in names if not name.startswith((*WRITERS, *DOUBLES))]


def test_nobody_but_the_loop_writes_a_request() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in modules()}
    assert len(texts) > 200
    # Most modules name no request at all.
    found = {name: writes_in(text) for name, text in texts.items() if NAMED.search(text)}
    found = {name: writes for name, writes in found.items() if writes}
    assert found == {}, "give it to DecodingLoop.add, or listen as an observer; tests have request_of and say"


def test_the_loop_itself_is_caught() -> None:
    for name in ("src/paceline/runtime/scheduler.py", "src/paceline/runtime/postprocess.py"):
        assert len(writes_in((ROOT / name).read_text(encoding="utf-8"))) >= 5


@pytest.mark.parametrize(
    "code",
    [
        "request.cached = 3",
        "stream.request.verifier = watching",
        "self._request.token_ids.append(1)",
        "request.token_ids[-1] = 2",
        "del request.token_ids[3:]",
        "request.segments += more",
        "request.stats.prompt_s = request.stats.decode_s = 0.0",
        "request.stats.prompt_tokens, seconds = 3, 4",
        "for request.cached in range(3): pass",
        "requests[0].cached += 1",
        "first_request.stats.phases.add(1, 2, 3, 4)",
        "stats = request.stats\n    stats.rounds += 1",
        "text, stats = request.text, request.stats\n    stats.arrivals_s.extend(late)",
        "token_ids = request.token_ids\n    token_ids += [1]",
        "setattr(request, name, 3)",
        "Request(-1, prompt, params, rules, speculation, verifier)",
    ],
)
def test_writes_are_seen(code: str) -> None:
    assert writes_in(f"def some() -> None:\n    {code}\n") != []


@pytest.mark.parametrize(
    "code",
    [
        "self.request = loop.add([1], params, rules)",
        "requests.append(request)",
        "known.requests[request.id] = state",
        "self._lengths[request.id] = request.stats.rounds",
        "answer = request.token_ids[request.num_prompt :]\n    answer.append(1)",
        "token_ids = request.token_ids\n    token_ids = [*token_ids, 1]",
        "requests.clear()",
        "request.verifier.walk(tree, 1, rows, history)",
    ],
)
def test_what_only_reads_is_not(code: str) -> None:
    assert writes_in(f"def some() -> None:\n    {code}\n") == []
