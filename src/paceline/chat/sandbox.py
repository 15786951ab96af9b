"""jinja2 as chat templates need it: as transformers has it, in a sandbox, with limits, and with marked texts.

What transformers sets up, and templates rely on: trimmed blocks, loop controls, ``tojson`` that leaves HTML alone,
``raise_exception``, ``strftime_now``, and the ``generation`` tag, which means nothing where nothing is trained.

Constants of the template and the text between its tags become :class:`~paceline.chat.marked_text.MarkedText` of the
template. Everything else that a template joins, prints or calls goes through here too, to keep the marks and to be
counted.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Namespace
from markupsafe import Markup

from paceline.chat.marked_text import MarkedText, template_marks
from paceline.chat.template_limits import (
    MAX_CHARACTERS,
    MAX_NODES,
    LimitError,
    check_argument,
    check_characters,
    check_grown,
    check_items,
    check_number,
    check_time,
    count_step,
    grow,
)

# What the work of these is cannot be told by what they are given, and no template of 70 looked at uses them.
_NOT_OFFERED: Final = ("pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")
"""Filters that are left out of the sandbox."""
_NO_TAGS: Final[dict[type[nodes.Node], str]] = {
    nodes.Block: "block",
    nodes.Extends: "extends",
    nodes.FromImport: "from",
    nodes.Import: "import",
    nodes.Include: "include",
    nodes.ScopedEvalContextModifier: "autoescape",
}
"""Tags that are refused, by their nodes: there are no other templates and no HTML, and what these compile to may be
long."""
_NO_METHODS: Final = ("encode", "expandtabs", "translate", "maketrans", "of_template", "joined")
"""Methods of texts that could make something long of something short, or are not for templates."""
_LIST_METHODS: Final[dict[str, Callable[..., Any]]] = {"append": grow, "pop": list.pop}
"""Methods that change a list and are offered: templates of Kimi K2 keep a queue of the ids of calls by them."""
_NO_ATTRIBUTES: Final = (int, float, bytes)
"""Kinds of values that no template needs an attribute of, and that make long numbers by theirs."""
_WIDE_FIELD: Final = re.compile(r"\d{4,}")
"""A width of four digits or more in a format field."""
_WIDE_PERCENT: Final = re.compile(r"%(\([^()]*\))?[-+ #0]*(\d*\.)?(\*|\d{4,})|%\([^)]*\(")
"""A ``%`` field that is wide, or as wide as a value says, or that has parentheses within its name."""
_WIDEST_FIELD: Final = 999
_WIDEST_INDENT: Final = 64


class TemplateRefusalError(TemplateError):
    """A template refused what it was given, in its own words."""


class _MarkingGenerator(CodeGenerator):
    """Generates code that marks the template's own text, and has joins and lists counted."""

    def visit(self, node: nodes.Node, *args: Any, **named: Any) -> Any:
        """Generate the code of a node, for which jinja2 may copy the names of all variables."""
        count_step()
        return super().visit(node, *args, **named)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            # Nothing is computed before it can be counted.
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.marked({super()._output_const_repr(group)})"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802 - jinja2's names
        if isinstance(node.value, str):
            self.write(f"environment.marked({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: N802
        self.write(f"environment.marked({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("environment.timed((")
        self._within("walked", self.visit, node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write("))")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        self.write(f" {operators[node.op]} ")
        self._within("walked", self.visit, node.expr, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self._within("timed", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.printed(")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._within("counted", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._within("counted", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._within("counted", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _within(self, call: str, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{call}(")
        visit(node, frame)
        self.write(")")


class _Generation(Extension):
    """The tag around what an assistant said, which trainers ask for."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace whose names lead nowhere within Python. Printed, what it holds is left out: it may hold itself."""

    def __init__(*args: Any, **names: Any) -> None:
        self, *given = args
        attributes = dict(*given, **names)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


class _ListMethod:
    """A method that changes a list: one of :data:`_LIST_METHODS`."""

    __slots__ = ("_name", "_values")

    def __init__(self, values: list[Any], name: str) -> None:
        self._values = values
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"

    def __call__(self, *args: Any) -> Any:
        return _LIST_METHODS[self._name](self._values, *args)


class _Formatter(SandboxedFormatter):
    """``str.format`` that keeps the marks of the fields it puts in as they are."""

    def fill(self, text: MarkedText, args: tuple[Any, ...], named: Mapping[str, Any]) -> MarkedText:
        # Where somebody's text is among the template's, there is no telling which of both a brace was.
        by_template = 0 not in template_marks(text)
        return MarkedText.joined(self._parts(text, by_template, args, named))

    def _parts(self, text: str, by_template: bool, args: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[str]:
        number = 0
        for literal, field, width, conversion in self.parse(text):
            yield MarkedText.of_template(literal) if by_template else literal
            if field is None:
                continue
            check_time()
            if not field or field[0] in ".[":
                field, number = f"{number}{field}", number + 1
            if _WIDE_FIELD.search(width or "") or "{" in (width or ""):
                raise LimitError(f"formats a text by {width!r}")
            value = self.get_field(field, args, named)[0]
            if conversion:
                value = self.convert_field(value, conversion)
            yield value if isinstance(value, str) and not width else self.format_field(value, width or "")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled and rendered in. Nothing is loaded from anywhere."""

    code_generator_class = _MarkingGenerator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        filters: dict[str, Any] = {**FILTERS}
        filters |= {
            "tojson": _tojson,
            "join": _join,
            "replace": _replace,
            "format": _format,
            "indent": _make_indenter(filters["indent"]),
            "sum": _sum,
        }
        for name in _NOT_OFFERED:
            del filters[name]
        self.filters: dict[str, Any] = {name: _count_calls(function) for name, function in filters.items()}
        tests: dict[str, Any] = {**TESTS}
        self.tests: dict[str, Any] = {name: _count_calls(test) for name, test in tests.items()}
        self.globals: dict[str, Any] = {
            "range": safe_range,
            "cycler": DEFAULT_NAMESPACE["cycler"],
            "joiner": DEFAULT_NAMESPACE["joiner"],
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template that is not too large, and have every turn of its loops counted."""
        template = super()._parse(source, name, filename)
        for number, node in enumerate(template.find_all(nodes.Node)):
            if number >= MAX_NODES:
                raise LimitError(f"has more than {MAX_NODES} names, constants, operations and tags")
            if type(node) in _NO_TAGS:
                raise TemplateSyntaxError(f"chat templates have no tag {_NO_TAGS[type(node)]!r}", node.lineno)
        for loop in template.find_all(nodes.For):
            step = nodes.Call(nodes.EnvironmentAttribute("begin_turn"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step))
            loop.body[0].set_lineno(loop.lineno)
        template.set_environment(self)
        return template

    # What generated code calls.
    marked = staticmethod(MarkedText.of_template)

    @staticmethod
    def concat(parts: Iterable[Any]) -> str:
        """Return parts one after the other; jinja2 has ``"".join``, which takes texts only."""
        parts = list(parts)
        check_grown(*parts)
        return MarkedText.joined(parts)

    @staticmethod
    def begin_turn() -> None:
        """Begin one turn of a loop, which is counted as all calls are."""

    @staticmethod
    def counted(value: Any) -> Any:
        check_time()
        check_items(value)
        return value

    @staticmethod
    def walked(value: Any) -> Any:
        """Return a value all of which may be walked next, if it is not too large."""
        check_grown(value)
        return value

    @staticmethod
    def timed(value: Any) -> Any:
        check_time()
        return value

    @staticmethod
    def printed(value: Any) -> str:
        check_time()
        check_grown(value)
        return value if isinstance(value, MarkedText) else MarkedText(str(value))

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: N805
        check_time()
        for value in (*args, *named.values()):
            check_argument(value)
        check_grown(getattr(__obj, "__self__", None), *args, *named.values())
        if __obj is Cycler or (isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs)):
            # These make lists of what they are given.
            check_items((args, named))
        return _check_result(super().call(__context, __obj, *args, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute, if what comes out is not too large."""
        check_time()
        check_grown(left, right)
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and whole:
            check_number(left.bit_length() * max(right, 0))
        elif operator == "*" and whole:
            check_number(left.bit_length() + right.bit_length())
        elif operator == "*":
            length = len(left) if hasattr(left, "__len__") else len(right) if hasattr(right, "__len__") else 0
            check_characters(length * next((n for n in (left, right) if isinstance(n, int)), 0))
        elif operator == "%" and isinstance(left, str):
            return _percent(left, right)
        return _check_result(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, _NO_ATTRIBUTES) or (isinstance(obj, str) and attr in _NO_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item; a text's methods are those of a marked text."""
        count_step()
        if type(obj) is list and attribute in _LIST_METHODS:
            return _ListMethod(obj, attribute)
        return super().getattr(_as_marked(obj), attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item or attribute; a text's methods are those of a marked text."""
        count_step()
        # What is not found is told in errors.
        check_grown(argument)
        return super().getitem(_as_marked(obj), argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what ``format`` of a text is to templates; ``None`` for what is no such method."""
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if not isinstance(owner, str) or name not in ("format", "format_map"):
            return None
        formatter, text = _Formatter(self), MarkedText(owner)
        if name == "format_map":
            return lambda mapping: formatter.fill(text, (), mapping)
        return lambda *args, **named: formatter.fill(text, args, named)


def _as_marked(value: Any) -> Any:
    return MarkedText(value) if isinstance(value, str) and not isinstance(value, MarkedText) else value


def _check_result(value: Any) -> Any:
    """Return what was computed, with marks if it is a text, unless it is too large."""
    if isinstance(value, int):
        check_number(value.bit_length())
    if not isinstance(value, str):
        check_items(value)
        return value
    check_characters(len(value))
    if isinstance(value, Markup):
        # What is added to it is escaped, as it is with transformers.
        count_step(value.__sizeof__())
        return value
    return _as_marked(value)


def _count_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that is counted, and whose texts are marked."""

    @functools.wraps(function)
    def counted(*args: Any, **named: Any) -> Any:
        check_time()
        for value in (*args[1:], *named.values()):
            check_argument(value)
        check_grown(*args, *named.values())
        result = function(*map(_as_marked, args), **named)
        return _items(result) if isinstance(result, Iterator) else _check_result(result)

    return counted


def _items(values: Iterator[Any]) -> Iterator[Any]:
    """Yield what a filter yields, counted one by one."""
    for value in values:
        check_time()
        yield _check_result(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    widest = max(len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ("",)))
    if widest > _WIDEST_INDENT:
        raise LimitError(f"indents or separates JSON by {widest} characters, and the most are {_WIDEST_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Part by part, as indents of indents can be long.
    return MarkedText.joined(encoder.iterencode(value))


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return MarkedText(d).join(map(str, value))


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    return MarkedText(str(value)).replace(str(old), MarkedText(str(new)), -1 if count is None else count)


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if isinstance(start, str):
        raise TypeError("texts have no sum: join them")
    values = iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    total = start
    for value in values:
        # A sum of lists copies them all for each.
        check_time()
        total = _check_result(total + value)
    return total


def _format(value: str, *args: Any, **named: Any) -> str:
    return _percent(value, named or args)


def _percent(text: str, values: Any) -> str:
    """Format by ``%``; what comes out counts as somebody's."""
    given = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
    if _WIDE_PERCENT.search(text):
        raise LimitError(f"formats a text by {text[:40]!r}")
    longest = max((len(value if isinstance(value, str) else str(value)) for value in given), default=0)
    check_characters(len(text) + text.count("%") * (longest + _WIDEST_FIELD))
    return MarkedText(str.__mod__(text, values))


def _make_indenter(indent: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(indent)
    def bounded(text: str, width: int | str = 4, *args: Any, **named: Any) -> str:
        step = len(width) if isinstance(width, str) else width
        check_characters(len(text) + (len(str.splitlines(text)) + 1) * step)
        return indent(text, width, *args, **named)

    return bounded


def _dict(*args: Any, **named: Any) -> dict[Any, Any]:
    return dict(*args, **named)


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(pattern: str) -> str:
    if _WIDE_FIELD.search(pattern) or len(pattern) > MAX_CHARACTERS >> 8:
        raise LimitError(f"formats a date by {pattern[:40]!r}")
    return datetime.now().strftime(pattern)
