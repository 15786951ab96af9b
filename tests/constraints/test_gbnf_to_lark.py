"""llama.cpp's grammars: what they are read as, and that the same texts are accepted as by their own definition."""

from __future__ import annotations

import random
from itertools import product

import pytest

pytest.importorskip("llguidance")

from paceline.constraints import Gbnf, gbnf_to_lark
from paceline.constraints.character_sets import least_fixed_point, transitive_unions
from paceline.constraints.gbnf_parser import Chars, Choice, Node, Ref, Repeat, Sequence, Token, parse_gbnf
from paceline.core.errors import ConstraintError
from paceline.engines.scripted import ScriptedVocabulary
from tests.constraints.helpers import accepts, allowed_texts, start_of
from tests.tiers import by_tier


def no_token(named: str) -> int:
    raise ConstraintError(f"{named} is no token")


def char(one: str) -> Chars:
    return Chars(((ord(one), ord(one)),))


def test_what_a_grammar_is_read_as() -> None:
    rules = parse_gbnf(
        '# A comment\nroot ::= "ab" x* | [a-c\\]-] (\n "c"? # more\n | .{2,3} )\n\nx ::= |\n  [^\\n\\x00-\\x08]',
        no_token,
    )
    any_char = Chars(((0, 0xD7FF), (0xE000, 0x10FFFF)))
    assert rules == {
        "root": Choice(
            (
                Sequence((Sequence((char("a"), char("b"))), Repeat(Ref("x"), 0, None))),
                Sequence(
                    (
                        Chars(((ord("-"), ord("-")), (ord("]"), ord("]")), (ord("a"), ord("c")))),
                        Choice((Repeat(char("c"), 0, 1), Repeat(any_char, 2, 3))),
                    )
                ),
            )
        ),
        "x": Choice((Sequence(()), Chars(((9, 9), (11, 0xD7FF), (0xE000, 0x10FFFF))))),
    }


def test_more_repetitions_than_llama_cpp_counts_are_any_number() -> None:
    assert parse_gbnf('root ::= "a"{2,5000} "b"{3,}', no_token) == {
        "root": Sequence((Repeat(char("a"), 2, None), Repeat(char("b"), 3, None)))
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the grammar has no rule named root"),
        ('start ::= "a"', "the grammar has no rule named root"),
        ('root ::= "a"\n  b', "line 2, column 4: expected ::= after the name b"),
        ('root ::= "a" b', "line 1, column 14: there is no rule named b"),
        ('root ::= "a', "line 1, column 12: the grammar ends within quotes or brackets"),
        ("root ::= [a", "line 1, column 12: the grammar ends within quotes or brackets"),
        ("root ::= [z-a]", "line 1, column 10: the range from 'z' to 'a' is empty"),
        ("root ::= []", "line 1, column 10: no character is in this class"),
        ("root ::= [\\uD800-\\uDFFF]", "line 1, column 10: no character is in this class"),
        ('root ::= "\\uD800"', "line 1, column 11: \\\\uD800 is not a character"),
        ('root ::= "\\q"', "line 1, column 11: \\\\q is not known"),
        ('root ::= "\\x4"', "line 1, column 11: expected 2 hexadecimal digits"),
        ("root ::= *", "line 1, column 11: nothing comes before this that could be repeated"),
        ('root ::= "a"{2,1}', "from 2 to 1 repetitions"),
        ('root ::= "a"{x}', "line 1, column 13: expected {m}, {m,} or {m,n}"),
        ('root ::= "a"{1000000000}', "1,000,000,000 repetitions, and the most is 2,000"),
        ('root ::= (("a"{1,50}){1,50}){1,50}', "more than 2,000 repetitions"),
        ('root ::= ("a"', "line 1, column 14: expected a closing parenthesis"),
        ('root ::= "a")', "line 1, column 13: '\\)' is not expected here"),
        ("root ::= <a", "line 1, column 10: expected a token in angle brackets"),
        ("root ::= <a>", "line 1, column 10: <a> is not a single token of this model"),
        ("root ::= <[257]>", "line 1, column 10: <\\[257\\]> is not a token of this model, which has 0 to 256"),
        ('root ::= root "a"', "a text of the rule root never ends"),
        ('root ::= "b" | a\na ::= "x" a', "a text of the rule a never ends"),
    ],
)
def test_an_error_says_the_line(text: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message) as raised:
        start_of(Gbnf(text))
    assert "\n" not in str(raised.value)


def test_a_part_that_could_swallow_what_follows_is_no_lexeme() -> None:
    grammar = Gbnf('root ::= [a-z]* "x" ws "\\n"\nws ::= [ \\n]*')
    assert all(accepts(grammar, text) for text in ("x\n", "axx\n", "x \n", "x\n\n", "x\n \n"))
    assert not accepts(grammar, "x ")
    assert accepts(Gbnf('root ::= ("a" | "ab") "bc"'), "abc")
    assert accepts(Gbnf('root ::= ("a" | "ab") "bc"'), "abbc")


def test_characters_and_escapes() -> None:
    grammar = Gbnf('root ::= "\\x41\\u00e9\\U0001F642\\t\\"\\\\/" [^a] [あ-う\\-\\]] .')
    assert accepts(grammar, 'Aé🙂\t"\\/\nい\n')
    assert accepts(grammar, 'Aé🙂\t"\\/b-🙂')
    assert not accepts(grammar, 'Aé🙂\t"\\/aいx')


def test_left_and_right_recursion() -> None:
    assert accepts(Gbnf('root ::= root "x" | "y"'), "yxxx")
    right = start_of(Gbnf('root ::= "x" root | [ab] root | "y"'))
    assert accepts(right, "xab" * 2_000 + "y")


def test_tokens_by_name_and_by_number() -> None:
    vocabulary = Named([b"a", b"b", b"<think>", b"</think>", b"<end>"], [4])
    state = start_of(Gbnf("root ::= <think> !</think>* <[3]> [ab]"), vocabulary)
    assert allowed_texts(state, vocabulary) == {b"<think>"}
    state.advance(2)
    # No end token, whatever else is allowed.
    assert allowed_texts(state, vocabulary) == {b"a", b"b", b"<think>", b"</think>"}
    state.advance(1)
    state.advance(3)
    assert allowed_texts(state, vocabulary) == {b"a", b"b"}


class Named(ScriptedVocabulary):
    """Has control tokens that a text may name."""

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset([2, 3, 4])

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        names = {b"<think>": 2, b"</think>": 3}
        if parse_special and text.encode() in names:
            return [names[text.encode()]]
        return super().tokenize(text)


def test_groups_in_groups() -> None:
    grammar = Gbnf("root ::= " + '("a" (root "b")? ' * 50 + ")" * 50)
    assert accepts(grammar, "a" * 50)


class Counted(dict[int, list[int]]):
    """Counts what is looked up."""

    num_looked_up = 0

    def __getitem__(self, key: int) -> list[int]:
        self.num_looked_up += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("seed", range(40))
def test_sets_that_include_one_another(seed: int) -> None:
    draws = random.Random(seed)
    number = draws.randint(1, 30)
    own = {key: 1 << key if draws.random() < 0.7 else 0 for key in range(number)}
    included = Counted({key: draws.choices(range(number), k=draws.randint(0, 3)) for key in range(number)})
    found = transitive_unions(own, included)
    assert included.num_looked_up == 2 * number
    for key in range(number):
        reached, rest = set[int](), [key]
        while rest:
            each = rest.pop()
            if each not in reached:
                reached.add(each)
                rest += included[each]
        assert found[key] == sum(own[each] for each in reached)


def test_what_holds_of_parts_that_refer_to_one_another() -> None:
    rules = parse_gbnf('root ::= a b | "x"\na ::= b c*\nb ::= c? | a\nc ::= "c" root+\nd ::= d | a "d" | d b', no_token)
    assert [name for name, rule in rules.items() if id(rule) in least_fixed_point(rules, characters=False)] == [
        "root",
        "a",
        "b",
    ]
    assert [name for name, rule in rules.items() if id(rule) in least_fixed_point(rules, characters=True)] == [*rules]
    without_end = parse_gbnf('root ::= a | "x"\na ::= b\nb ::= a b', no_token)
    assert [
        name for name, rule in without_end.items() if id(rule) in least_fixed_point(without_end, characters=True)
    ] == ["root"]


NUM_GRAMMARS = by_tier(150, quick=60)


@pytest.mark.parametrize(
    ("part", "steps"), [(0, None), (1, None), (0, 0), (1, 50)], ids=["first", "second", "characters", "few lexemes"]
)
def test_the_texts_of_random_grammars(part: int, steps: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if steps is not None:
        monkeypatch.setattr(gbnf_to_lark, "_MAX_STEPS", steps)
    seeds = range(part, NUM_GRAMMARS, 2 if steps is None else 4)
    num_texts = num_accepted = 0
    for seed in seeds:
        draws = random.Random(seed)
        names = ["root", "x", "y", "z"][: draws.randint(1, 4)]
        text = "\n".join(f"{name} ::= {random_choice(draws, names, 0)}" for name in names)
        try:
            state = start_of(Gbnf(text))
        except ConstraintError as error:
            assert "never ends" in str(error)  # noqa: PT017
            continue
        rules = parse_gbnf(text, no_token)
        for word in draws.sample(WORDS, 25) + WORDS[:13]:
            wanted = matches(rules, word)
            assert accepts(state, word) == wanted, f"{seed}: {word!r}\n{text}"
            num_texts += 1
            num_accepted += wanted
    assert num_texts > len(seeds) * 26
    assert num_accepted > len(seeds) * 4


WORDS = ["".join(word) for length in range(6) for word in product("abc", repeat=length)]


def random_choice(draws: random.Random, names: list[str], depth: int) -> str:
    return " | ".join(random_sequence(draws, names, depth) for _ in range(draws.choice((1, 1, 2, 3))))


def random_sequence(draws: random.Random, names: list[str], depth: int) -> str:
    repeated = ("", "", "", "*", "+", "?", "{2}", "{1,2}", "{2,}")
    length = draws.choice((0, 1, 1, 2, 2, 3))
    return " ".join(random_item(draws, names, depth) + draws.choice(repeated) for _ in range(length)) or '""'


def random_item(draws: random.Random, names: list[str], depth: int) -> str:
    kind = draws.random()
    if kind < 0.3:
        return '"' + "".join(draws.choice("abc") for _ in range(draws.choice((1, 1, 2, 3)))) + '"'
    if kind < 0.5:
        return draws.choice(("[ab]", "[a-c]", "[^a]", "[^ab]", "[c]", "."))
    if kind < 0.75 or depth == 2:
        return draws.choice(names)
    return f"({random_choice(draws, names, depth + 1)})"


def matches(rules: dict[str, Node], text: str) -> bool:
    """Return whether a grammar has a text: ends of rules from each place, until no more are found."""
    ends: dict[tuple[str, int], frozenset[int]] = {
        (name, start): frozenset() for name in rules for start in range(len(text) + 1)
    }

    known: dict[tuple[int, int], frozenset[int]] = {}

    def ends_of(node: Node, start: int) -> frozenset[int]:
        if (id(node), start) not in known:
            known[id(node), start] = find_ends(node, start)
        return known[id(node), start]

    def find_ends(node: Node, start: int) -> frozenset[int]:
        match node:
            case Chars():
                within = start < len(text) and any(low <= ord(text[start]) <= high for low, high in node.ranges)
                return frozenset([start + 1] if within else [])
            case Ref():
                return ends[node.name, start]
            case Sequence():
                places = frozenset([start])
                for item in node.items:
                    places = after(item, places)
                return places
            case Choice():
                return frozenset().union(*(ends_of(option, start) for option in node.options))
            case Repeat():
                places = frozenset([start])
                for _ in range(node.least):
                    places = after(node.item, places)
                found = places
                for _ in range(len(text) + 1 if node.most is None else node.most - node.least):
                    places = after(node.item, places) - found
                    found |= places
                return found
            case Token():
                raise AssertionError("no token is in these grammars")

    def after(node: Node, places: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(ends_of(node, place) for place in places))

    changed = True
    while changed:
        changed = False
        known.clear()
        for name, start in ends:
            found = ends_of(rules[name], start)
            changed = changed or found != ends[name, start]
            ends[name, start] = found
    return len(text) in ends["root", 0]
