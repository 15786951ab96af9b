"""Sources that are made to take long, drawn at random: of every kind, and up to the sizes that are let in and beyond.

Each seed gives one source, always the same. Most of it is one way to cost much in many places, and the rest of another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from paceline.constraints import Choice, Gbnf, JsonSchema, Lark, Regex, Source

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def hostile_source(seed: int) -> tuple[str, Callable[[], Source]]:
    """Return what kind of source a seed gives, and what makes it: that may be refused by itself."""
    draws = random.Random(seed)
    kind = draws.choice([*_KINDS])
    return kind, _KINDS[kind](draws)


def _size(draws: random.Random, most: int) -> int:
    """Return a size, small and large ones as often: some are above what is let in."""
    return max(1, int(most ** draws.uniform(0.3, 1.05)))


# Expressions, in the notations that have groups, alternatives, counts and classes.


def _chars(draws: random.Random) -> str:
    match draws.randrange(6):
        case 0:
            return "[^x]"
        case 1:
            return "[a-z0-9_]"
        case 2:
            picked = sorted(draws.sample(_LETTERS, draws.randint(1, 6)))
            return f"[{''.join(picked)}]"
        case 3:
            # As many pieces as a class may have.
            first = draws.randrange(0x100, 0x3000)
            return "[" + "".join(chr(first + 2 * i) for i in range(_size(draws, 300))) + "]"
        case 4:
            return "."
        case _:
            return "[ab]"


def _count(draws: random.Random) -> str:
    most = _size(draws, 1_500)
    return draws.choice(["*", "+", "?", f"{{{most}}}", f"{{0,{most}}}", f"{{{most // 2},{most}}}", f"{{{most},}}"])


def _expression(draws: random.Random, size: int, quoted: Callable[[str], str], names: list[str]) -> str:
    """Return an expression of about ``size`` characters or classes."""
    joined = " " if quoted("a") != "a" else ""
    atoms: list[Callable[[], str]] = [
        lambda: _chars(draws),
        lambda: quoted("".join(draws.choice("abx") for _ in range(draws.randint(1, 8)))),
    ]
    if names:
        atoms += [lambda: draws.choice(names)] * 2

    def some(number: int, depth: int) -> str:
        if number <= 1 or depth > 12:
            atom = draws.choice(atoms)()
            return f"({atom}){_count(draws)}" if draws.random() < 0.3 else atom
        width = min(number, draws.choice([2, 3, 8, 50, 300]))
        shape = draws.random()
        if shape < 0.25:
            # The same many times over: what differs by little is compared longest.
            part = some(max(1, number // width), depth + 1)
            whole = draws.choice([joined, f"{joined}|{joined}"]).join([part] * width)
        elif shape < 0.6:
            parts = [some(max(1, number // width), depth + 1) for _ in range(width)]
            whole = f"{joined}|{joined}".join(parts)
        elif shape < 0.85:
            whole = joined.join(some(max(1, number // width), depth + 1) for _ in range(width))
        else:
            return f"({some(number // 2, depth + 1)}){_count(draws)}"
        return f"({whole})"

    return some(size, 0)


def _swallowed(draws: random.Random, quoted: Callable[[str], str]) -> str:
    """Return alternatives that tell what they are only far behind a place where each could begin."""
    joined = " " if quoted("a") != "a" else ""
    length = _size(draws, 200)
    alternatives = []
    for i in range(_size(draws, 3_000 // (length + 3) + 2)):
        part = joined.join([draws.choice(["[ab]", "[a-c]", "[ab]"])] * (length + i % 3))
        alternatives.append(f"[ab]*{joined}{quoted(draws.choice('ab'))}{joined}{part}")
    return "|".join(alternatives)


def _quoted(text: str) -> str:
    return f'"{text}"'


def _plain(text: str) -> str:
    return text


def _rules(draws: random.Random, assign: str, start: str, most_rules: int, most_size: int) -> str:
    """Return rules that refer to one another: in a row, in circles, or anyhow."""
    number = _size(draws, most_rules)
    names = [f"r{i}" for i in range(number)]
    lines = []
    shape = draws.choice(["row", "circle", "tree", "any", "optional"])
    each = max(1, _size(draws, most_size) // number)
    for i, name in enumerate(names):
        after = [names[(i + 1) % number]] if i + 1 < number or shape == "circle" else []
        match shape:
            case "row" | "circle":
                used = " ".join(after)
                body = draws.choice([f'"a" {used}', f"{used} {used}", f'{used}? "{i:x}"', f'{used} | "b"'])
            case "tree":
                body = " ".join(names[min(number - 1, 2 * i + k)] for k in (1, 2) if 2 * i + k < number)
            case "optional":
                body = " ".join(f'("{name}" | {used}?)*' for used in draws.sample(names, min(number, 3)))
            case _:
                body = _expression(draws, each, _quoted, draws.sample(names, min(number, 5)))
        lines.append(f"{name}{assign} {body.strip() or '[a]'} | {draws.choice(['[b]', _quoted('c' * (i % 7 + 1))])}")
    draws.shuffle(lines)
    return "\n".join([f"{start}{assign} {names[0]} {_quoted('end')}", *lines])


def _gbnf(draws: random.Random) -> Callable[[], Source]:
    shape = draws.random()
    if shape < 0.25:
        text = "root ::= " + _swallowed(draws, _quoted)
    elif shape < 0.55:
        text = "root ::= " + _expression(draws, _size(draws, 20_000), _quoted, [])
    elif shape < 0.65:
        # Characters of their own everywhere.
        number = _size(draws, 9_000)
        text = (
            "root ::= (" + "|".join(f"[{chr(0x4000 + 2 * i)}]* [^{chr(0x4001 + 2 * i)}]" for i in range(number)) + ")*"
        )
    elif shape < 0.75:
        body = " ".join(["[a-z]"] * _size(draws, 1_900))
        number = _size(draws, 1_900)
        text = f"root ::= ({' | '.join(f'p{i}' for i in range(number))})*\nw ::= {body}\n"
        text += "\n".join(f'p{i} ::= w "{i}" w?' for i in range(number))
    else:
        text = _rules(draws, " ::=", "root", 2_000, 18_000)
    return lambda: Gbnf(text)


def _regex(draws: random.Random) -> Callable[[], Source]:
    if draws.random() < 0.3:
        text = _swallowed(draws, _plain)[: _size(draws, 8_000)].rpartition("|")[0] or "a"
    else:
        text = _expression(draws, _size(draws, 2_000), _plain, [])
        if draws.random() < 0.3:
            text = draws.choice(["(?i)", "(?s)", ".*", r"\w*", r"(\d|\p{L})*"]) + text
    return lambda: Regex(text)


def _lark(draws: random.Random) -> Callable[[], Source]:
    shape = draws.random()
    if shape < 0.2:
        text = f"start: {_expression(draws, _size(draws, 3_000), _quoted, [])}".replace("[", "/[").replace("]", "]/")
    elif shape < 0.4:
        text = _rules(draws, ":", "start", 500, 3_000).replace("[", "/[").replace("]", "]/")
    elif shape < 0.6:
        parts = [f"/{_expression(draws, _size(draws, 200), _plain, [])}/" for _ in range(_size(draws, 30))]
        signs = [draws.choice(["", "~"]) for _ in parts]
        text = "start: TEXT\nTEXT: " + " & ".join(f"{sign}{part}" for sign, part in zip(signs, parts, strict=True))
    elif shape < 0.8:
        schemas = []
        for _ in range(_size(draws, 50)):
            import json

            schemas.append(f"%json {json.dumps(_schema(draws, _size(draws, 300)))}")
        text = "start: " + draws.choice([" ", " | "]).join(schemas)
    else:
        number = _size(draws, 400)
        body = draws.choice(["R{n} R{n}", "R{n}? /[ab]/", "(R{n} | /a/)*", '"a" R{n} | R{n} "a"', "R{n}{0,50}"])
        lines = [f"R{i}: {body.replace('{n}', str(i + 1))}" for i in range(number)]
        text = "\n".join(["start: R0", *lines, f"R{number}: /[ab]/"])
    return lambda: Lark(text)


def _choice(draws: random.Random) -> Callable[[], Source]:
    number = _size(draws, 60_000)
    length = max(1, min(_size(draws, 5_000), 500_000 // number))
    shape = draws.randrange(3)
    texts = []
    for i in range(number):
        filled = "".join(draws.choices("ab", k=min(length, 40)))
        texts.append([f"{'a' * length}{i}", f"{i}{filled}", f"{filled}{i:x}{filled}"][shape])
    return lambda: Choice(texts)


# Schemas.


def _pattern(draws: random.Random) -> str:
    return "^" + _expression(draws, _size(draws, 200), _plain, []) + draws.choice(["$", "", ".*$"])


def _leaf(draws: random.Random, names: list[str]) -> Any:
    number = _size(draws, 1_000)
    leaves: list[Callable[[], Any]] = [
        lambda: {"type": "string", "maxLength": _size(draws, 100_000)},
        lambda: {"type": "string", "minLength": number, "maxLength": number + _size(draws, 1_000)},
        lambda: {"type": "string", "pattern": _pattern(draws)},
        lambda: {"type": "string", "pattern": _pattern(draws), "maxLength": number},
        lambda: {"type": "string", "format": draws.choice(_FORMATS), "maxLength": _size(draws, 60)},
        lambda: {"type": "integer", "minimum": -number, "maximum": draws.randrange(10**9)},
        lambda: {"type": "number", "exclusiveMinimum": draws.random(), "maximum": draws.uniform(1, 1e9)},
        lambda: {"type": "integer", "multipleOf": draws.randint(2, 3_000)},
        lambda: {"enum": [f"{_LETTERS[i % 26]}{i}" for i in range(_size(draws, 300))]},
        lambda: {"type": "array", "items": {"const": "x" * min(number, 50)}, "minItems": number},
        lambda: True,
    ]
    if names:
        leaves += [lambda: {"$ref": f"#/$defs/{draws.choice(names)}"}] * 4
    return draws.choice(leaves)()


def _schema(draws: random.Random, size: int, names: list[str] | None = None, depth: int = 0) -> Any:
    names = names or []
    if size <= 1 or depth > 30:
        return _leaf(draws, names)
    width = min(size, draws.choice([1, 2, 3, 20, 100, 2_000]))
    each = max(1, (size - 1) // width)

    def parts(number: int) -> list[Any]:
        return [_schema(draws, each, names, depth + 1) for _ in range(number)]

    letter = draws.choice(_LETTERS)
    keys = [f"{letter}{i}" for i in range(width)]
    match draws.randrange(9):
        case 0 | 1 | 2:
            required = draws.sample(keys, draws.choice([0, 0, width // 2, width]))
            found = {"type": "object", "properties": dict(zip(keys, parts(width), strict=True)), "required": required}
            return found | draws.choice([{}, {}, {"additionalProperties": {"type": "integer"}}])
        case 3:
            return {"anyOf": parts(width)}
        case 4:
            return {"oneOf": parts(min(width, 50))}
        case 5:
            return {"allOf": parts(min(width, 8))}
        case 6:
            return {"type": "array", "prefixItems": parts(width), "items": _leaf(draws, names)}
        case 7:
            count = _size(draws, 2_000)
            return {"type": "array", "items": parts(1)[0], "minItems": count // 2, "maxItems": count}
        case _:
            patterns = [f"^{key}{_chars(draws)}{{0,{_size(draws, 200)}}}$" for key in keys[:60]]
            return {"type": "object", "patternProperties": dict(zip(patterns, parts(len(patterns)), strict=True))}


def _whole_schema(draws: random.Random) -> Any:
    shape = draws.random()
    if shape < 0.1:
        return {"enum": [draws.choice(["a" * 9, "é", ""]) + str(i) for i in range(_size(draws, 40_000))]}
    if shape < 0.2:
        of = draws.choice([{}, {"type": "integer"}, {"type": "string", "maxLength": 40}, {"enum": ["a", 1]}])
        number = _size(draws, 8_000)
        required = [f"p{i}" for i in range(draws.randrange(number))]
        return {"type": "object", "properties": {f"p{i}": of for i in range(number)}, "required": required}
    if shape < 0.5:
        names = [f"d{i}" for i in range(_size(draws, 3_000))]
        each = max(1, _size(draws, 6_000) // len(names))
        parts = {name: _schema(draws, each, draws.sample(names, min(4, len(names)))) for name in names}
        return {"$ref": f"#/$defs/{names[0]}", "$defs": parts}
    return _schema(draws, _size(draws, 8_000))


def _json(draws: random.Random) -> Callable[[], Source]:
    schema, strict = _whole_schema(draws), draws.random() < 0.6
    return lambda: JsonSchema(schema, strict=strict)


def hostile_tools(seed: int) -> list[dict[str, Any]]:
    """Return functions of a request whose parameters take long, always the same for a seed."""
    draws = random.Random(seed)
    number = _size(draws, 128)
    each = max(1, _size(draws, 6_000) // number)
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "strict": draws.random() < 0.5,
                "parameters": {
                    "type": "object",
                    "properties": {f"p{k}": _schema(draws, max(1, each // 4)) for k in range(4)},
                },
            },
        }
        for i in range(number)
    ]


_KINDS: dict[str, Callable[[random.Random], Callable[[], Source]]] = {
    "grammar": _gbnf,
    "regular expression": _regex,
    "Lark grammar": _lark,
    "choice": _choice,
    "schema": _json,
}
