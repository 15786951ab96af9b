"""Templates come with models, so from anybody: none gets at what is not its own, takes long, or makes much."""

from __future__ import annotations

import functools
import gc
import re
import resource
import sys
import time
from collections.abc import Iterator

import jinja2
import pytest

from paceline.chat import template_limits
from paceline.chat.messages import read_messages
from paceline.chat.template import ChatTemplate
from paceline.core.errors import InputError, ModelFileError, PacelineError
from tests.chat.attacks import LARGE, ODD, REACHING
from tests.tiers import some_long
from tests.timing import processor_s

MAX_BYTES = 800 << 20
# None of these is in what a template renders or its errors say: they are Python's, or this program's.
SECRETS = re.compile(r"__builtins__|<module|<frame|<code|subclasses|root:|jinja2\.|\\x01")


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--quick"):
        monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.1)


@pytest.fixture(autouse=True, scope="module")
def nothing_to_collect() -> Iterator[None]:
    """What other tests left is not looked through while a template is run."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@functools.cache
def excess_s() -> float:
    """Return the processor time that may come on top, for what takes long at once: that of two honest ones as long."""
    return 2 * processor_s(lambda: jinja2.Environment().from_string("{{ a }}" * 8000))


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def render(source: str) -> str | PacelineError:
    """Return what a template renders or raises, which takes little time and memory."""
    bytes_before, cpu_s = peak_bytes(), time.thread_time()
    result: str | PacelineError
    try:
        result = str.__str__(ChatTemplate(source, origin="evil.gguf").render(read_messages("hi")))
    except PacelineError as error:
        result = error
    cpu_s = time.thread_time() - cpu_s
    assert cpu_s < template_limits.MAX_CPU_S + excess_s()
    assert peak_bytes() - bytes_before < MAX_BYTES
    assert not SECRETS.search(str(result))
    if isinstance(result, PacelineError):
        line = str(result)
        assert "\n" not in line
        assert len(line) < 600
        assert "evil.gguf" in line
        assert line.endswith("use another (`template_file`)"), "the way out"
    return result


@pytest.mark.parametrize("name", REACHING)
def test_what_is_not_the_template_s_own_is_refused(name: str) -> None:
    error = render(REACHING[name])
    assert isinstance(error, ModelFileError)
    assert re.search(
        r"reaches for what is not its own|is no template: line 1: (No filter|chat templates have)", str(error)
    )


@pytest.mark.parametrize("name", some_long(LARGE, quick=list(LARGE)[::6]))
def test_what_takes_or_makes_too_much_is_refused(name: str) -> None:
    error = render(LARGE[name])
    assert isinstance(error, ModelFileError)
    assert re.search(
        r"takes more than 0\.\d seconds|makes (a text|texts|a list|lists|a number)|has more than \d+ |"
        r"gives a filter or method|formats a (text|date) by|indents or separates JSON",
        str(error),
    )


@pytest.mark.parametrize("name", some_long(ODD, quick=list(ODD)[::3]))
def test_what_is_odd_is_harmless(name: str) -> None:
    result = render(ODD[name])
    if isinstance(result, PacelineError):
        # How many seconds it takes depends on the machine, and Python's own limits on its version.
        assert re.search("(fails on|refuses) these messages|is no template|takes more than", str(result))
    else:
        assert len(result) <= template_limits.MAX_CHARACTERS


def test_a_limit_is_for_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_BYTES", 100_000)
    template = ChatTemplate("{% set x = messages[0].content * 500 %}{{ x|length }}", origin="a.gguf")
    for _ in range(10):
        assert template.render(read_messages("a" * 50)) == "25000"


def test_collecting_garbage_is_not_the_templates_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with many objects may take longer for that than a template may."""
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.05)

    def collect(generation: int) -> None:
        with template_limits.limit_rendering():
            began_s = time.thread_time()
            while time.thread_time() < began_s + 0.1:
                gc.collect(generation)
            template_limits.check_time()

    before = [*gc.callbacks]
    collect(2)
    assert gc.callbacks == before
    # A template may make much that is collected at once.
    with pytest.raises(template_limits.LimitError):
        collect(1)


def test_a_long_conversation_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates in use walk all messages for each of them."""
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.0)
    walk = "{% for a in messages %}{% for b in messages %}{% set c = b.content|trim %}{% endfor %}{% endfor %}"
    template = ChatTemplate(walk, origin="a.gguf")
    assert template.render(read_messages([{"role": "user", "content": "hi"}] * 30)) == ""
    monkeypatch.setattr(template_limits, "CPU_S_PER_MESSAGE", 0.0)
    with pytest.raises(ModelFileError, match=r"takes more than 0\.0 seconds of processor time"):
        template.render(read_messages([{"role": "user", "content": "hi"}] * 30))


def test_what_is_given_has_limits_too() -> None:
    template = ChatTemplate("{{ messages[0].content }}", origin="a.gguf")
    text = "a" * (template_limits.MAX_CHARACTERS // 2 + 1)
    with pytest.raises(InputError, match="the input of the chat template makes a list of texts of more than") as caught:
        template.render(read_messages([{"role": "user", "content": text}] * 2))
    assert str(caught.value).endswith("give less")


def test_limits_hold_in_the_template_for_tools_too() -> None:
    template = ChatTemplate("{{ 1 }}", origin="a.gguf", with_tools="{{ 'a' * 10000000 }}")
    assert template.render(read_messages("hi")) == "1"
    with pytest.raises(ModelFileError, match="makes a text of 10000000 characters"):
        template.render(read_messages("hi"), tools=[])
    with pytest.raises(ModelFileError, match="is no template"):
        ChatTemplate("{{ 1 }}", origin="a.gguf", with_tools="{% for %}")
