"""The page's chat: conversations that the browser keeps, messages, answers as they are written, and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from playwright.sync_api import Browser, FilePayload, Locator, Page, Request, expect

from tests.page.conftest import Halting
from tests.page.visiting import WIDE, Theme, serious, visiting
from tests.serving.calling import SAID, TEMPLATE, TOOLS, saying
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.processes import poll
from tests.serving.reasoning import ANSWER, thinking
from tests.serving.scripted import Turnstile

PATH: Final = "**/v1/chat/completions"


def say(page: Page, text: str, *, most: int | None = None) -> None:
    """Ask, which the answer's end is not waited for."""
    if most is not None:
        page.get_by_role("spinbutton", name="Max tokens").fill(str(most))
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("textbox", name="Message").press("Enter")


def ask(page: Page, text: str, most: int = 6) -> dict[str, Any]:
    """Ask, wait for the end of the answer, and return what was sent."""
    with page.expect_request(PATH) as sent:
        say(page, text, most=most)
    wait_for_end(page)
    return body_of(sent.value)


def body_of(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = request.post_data_json
    return body


def wait_for_end(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    expect(page.locator(".state").last).to_have_text(re.compile("tokens/s|stopped"))


def names(page: Page) -> Locator:
    """The names in the list of conversations."""
    return page.get_by_role("navigation", name="Conversations").locator(".name")


def letters(text: str | None) -> list[str]:
    """What markdown leaves of a text that is written at random."""
    return re.findall("[a-h]", text or "")


def markdown_file(name: str, text: str) -> FilePayload:
    return {"name": name, "mimeType": "text/markdown", "buffer": text.encode()}


def test_conversations_are_found_renamed_exported_deleted_and_imported(
    browser: Browser, served_script: Hosted, tmp_path: Path
) -> None:
    with visiting(browser, f"{served_script.url}/") as page:
        box = page.get_by_role("textbox", name="Message")
        expect(box).to_be_focused()
        # At the bottom of the window, and all of it.
        below = page.evaluate("innerHeight - document.querySelector('.composer form').getBoundingClientRect().bottom")
        assert 0 <= below < 60
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        ask(page, "First question\nof two lines")
        box.press("Control+Shift+O")
        expect(page.locator(".turn")).to_have_count(0)
        for _ in range(2):
            page.get_by_role("link", name="New chat").click()
            expect(box).to_be_focused()
        ask(page, "A second one")
        expect(names(page)).to_have_text(["A second one", "First question"])
        # What is looked for is in a text, not in a name.
        box.press("Control+k")
        search = page.get_by_role("searchbox", name="Search")
        expect(search).to_be_focused()
        search.fill("LINES two")
        expect(names(page)).to_have_text(["First question"])
        search.fill("nowhere")
        expect(page.get_by_text("No conversation has these words.")).to_be_visible()
        search.fill("")
        page.get_by_role("link", name="First question").click()
        expect(page.locator(".asked")).to_have_text(re.compile("of two lines"))
        page.get_by_role("button", name="Rename").press("Enter")
        page.get_by_role("textbox", name="Name of the conversation").fill("A long name " * 20)
        page.keyboard.press("Enter")
        named = page.get_by_role("heading", name="A long name")
        assert named.evaluate("each => each.offsetHeight < 2 * parseFloat(getComputedStyle(each).fontSize)")
        page.get_by_role("button", name="Rename").press("Enter")
        page.get_by_role("textbox", name="Name of the conversation").fill("<b>Renamed</b>")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="<b>Renamed</b>")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="<b>Renamed</b>")).to_be_visible()
        answer = page.locator(".formatted").inner_text()
        with page.expect_download() as one:
            page.get_by_role("button", name="Export", exact=True).click()
        assert one.value.suggested_filename == "-b-Renamed-b-.json"
        exported = json.loads(Path(one.value.path()).read_text())
        assert [each["role"] for each in exported["messages"]] == ["user", "assistant"]
        with page.expect_download() as both:
            page.get_by_role("button", name="Export all").click()
        both.value.save_as(tmp_path / "all.json")
        # It is deleted by whoever says so twice.
        page.get_by_role("button", name="Delete").press("Enter")
        page.get_by_role("dialog", name="There is no other copy").press("Escape")
        page.get_by_role("button", name="Delete").press("Enter")
        page.get_by_role("button", name="Keep it").press("Enter")
        expect(names(page)).to_have_count(2)
        page.get_by_role("button", name="Delete").press("Enter")
        page.get_by_role("button", name="Delete it").press("Enter")
        expect(names(page)).to_have_text(["A second one"])
        expect(box).to_be_focused()
        page.reload()
        expect(names(page)).to_have_text(["A second one"])
        # What is here already stays beside its copy.
        chosen = page.locator("input[accept*=json]")
        chosen.set_input_files(tmp_path / "all.json")
        expect(names(page)).to_have_text(["<b>Renamed</b>", "A second one", "A second one"])
        page.get_by_role("link", name="<b>Renamed</b>").click()
        expect(page.locator(".formatted")).to_have_text(answer, use_inner_text=True)
        # As /save in the terminal writes it, and files of nothing that is known.
        saved = {"messages": [{"role": "system", "content": "Be brief."}, *exported["messages"]]}
        chosen.set_input_files({"name": "saved.json", "mimeType": "", "buffer": json.dumps(saved).encode()})
        expect(names(page).first).to_have_text("First question")
        names(page).first.click()
        system = page.get_by_role("textbox", name="System prompt (of this chat and new ones)")
        expect(system).to_have_value("Be brief.")
        # One that is changed counts for new chats, and for no other.
        system.fill("Be briefer.")
        page.get_by_role("link", name="New chat").click()
        expect(system).to_have_value("Be briefer.")
        page.get_by_role("link", name="A second one").first.click()
        expect(system).to_have_value("")
        for broken in ("{", "null", "7", '{"conversations": []}', '{"messages": "a"}'):
            chosen.set_input_files({"name": "broken.json", "mimeType": "", "buffer": broken.encode()})
            expect(page.get_by_role("alert")).to_contain_text("broken.json cannot be imported")
            page.get_by_role("button", name="Dismiss").click()
        expect(names(page)).to_have_count(4)


def test_messages_are_edited_answered_again_and_continued(browser: Browser, served_script: Hosted) -> None:
    with visiting(browser, f"{served_script.url}/") as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("spinbutton", name="Seed").fill("7")
        first = ask(page, "One")
        ask(page, "Two")
        box = page.locator("#chat-message")
        box.press("ArrowUp")
        editor = page.locator(".turn").get_by_role("textbox", name="Message")
        expect(editor).to_have_value("Two")
        editor.press("Escape")
        expect(editor).to_have_count(0)
        # A message that was edited begins another branch, and the first one can be shown again.
        page.locator(".mine").first.get_by_role("button", name="Edit").click()
        page.keyboard.type("abc")
        expect(editor).to_have_value("Oneabc")
        expect(box).to_have_value("")
        editor.fill("One,")
        editor.press("Shift+Enter")
        page.keyboard.type("anew")
        with page.expect_request(PATH) as sent:
            editor.press("Enter")
        wait_for_end(page)
        assert [each["content"] for each in body_of(sent.value)["messages"]] == ["One,\nanew"]
        expect(page.locator(".asked")).to_have_text(["You: One,\nanew"])
        page.get_by_role("button", name="Previous version").click()
        expect(page.locator(".asked")).to_have_text(["You: One", "You: Two"])
        page.get_by_role("button", name="Next version").click()
        expect(page.locator(".asked")).to_have_text(["You: One,\nanew"])
        # Another seed, also where one is kept.
        with page.expect_request(PATH) as sent:
            page.get_by_role("button", name="Regenerate").click()
        wait_for_end(page)
        assert first["seed"] == 7
        assert body_of(sent.value)["seed"] != 7
        assert body_of(sent.value)["messages"] == [{"role": "user", "content": "One,\nanew"}]
        expect(page.locator(".branches")).to_contain_text("3/3")
        expect(page.get_by_role("spinbutton", name="Seed")).to_have_value("7")
        answered = page.locator(".formatted").inner_text()
        page.locator(".written").get_by_role("button", name="Copy").click()
        assert letters(page.evaluate("navigator.clipboard.readText()")) == letters(answered)
        page.locator(".written").get_by_role("button", name="Edit").click()
        page.get_by_role("textbox", name="Answer").fill("It begins so:")
        page.get_by_role("button", name="Save").click()
        with page.expect_request(PATH) as sent:
            page.get_by_role("button", name="Continue").click()
        wait_for_end(page)
        assert body_of(sent.value)["continue_final_message"] is True
        assert body_of(sent.value)["messages"][-1] == {"role": "assistant", "content": "It begins so:"}
        expect(page.locator(".formatted")).to_have_text(re.compile("^It begins so:."))
        page.reload()
        expect(page.locator(".formatted")).to_have_text(re.compile("^It begins so:."))


CUT_OFF: Final = """() => {
    const context = document.createElement("canvas").getContext("2d");
    return [...document.querySelectorAll("#chat-settings input[type=number]")].flatMap((box) => {
        const { fontSize, fontFamily, paddingLeft, paddingRight } = getComputedStyle(box);
        context.font = `${fontSize} ${fontFamily}`;
        const room = box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
        return context.measureText(box.value || box.placeholder).width > room - 15 ? [box.id] : [];
    });
}"""
"""Boxes of numbers that do not show all of their values or placeholders beside a scroll bar, which is hidden here."""


def test_all_that_is_set_is_sent(browser: Browser, served_script: Hosted) -> None:
    params = served_script.get("/props").json()["default_generation_settings"]["params"]
    # Fields of what is not built, and those that have no box: the limit and the seed have their own.
    others = {"seed", "max_tokens", "n_predict", "n_probs", "n_keep", "n_discard", "min_keep"}
    known = {name for name, value in params.items() if type(value) in (int, float)} - others
    known = {name for name in known if not name.startswith(("mirostat", "adaptive_"))}
    texts: dict[str, tuple[str, dict[str, Any]]] = {
        "Stop texts": ("zzz\nq\\nq", {"stop": ["zzz", "q\nq"]}),
        "JSON schema": ('{"type": "integer"}', {"json_schema": {"type": "integer"}}),
        "DRY sequence breakers": ("a\nb", {"dry_sequence_breakers": ["a", "b"]}),
        "Order of samplers": ("top_k; temperature", {"samplers": ["top_k", "temperature"]}),
        "Logit bias": ('{"97": -1}', {"logit_bias": {"97": -1}}),
    }
    with visiting(browser, f"{served_script.url}/") as page:
        page.get_by_text("Stop texts, JSON").click()
        page.get_by_text("All samplers").click()
        boxes = page.locator("#chat-settings input[type=number]")
        found = {(box.get_attribute("id") or "").removeprefix("chat-"): box for box in boxes.all()}
        assert known <= set(found)
        found["seed"].fill("4294967295")
        assert page.evaluate(CUT_OFF) == []
        page.set_viewport_size({"width": 390, "height": WIDE[1]})
        page.get_by_role("button", name="Settings").click()
        assert page.evaluate(CUT_OFF) == []
        page.keyboard.press("Escape")
        page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
        # An empty box shows what the server does by itself.
        for name in known:
            assert float(found[name].get_attribute("placeholder") or "") == pytest.approx(params[name], abs=1e-4)
        sent_numbers = {name: 1 if name != "xtc_probability" else 0 for name in set(found) - {"most", "seed"}}
        for name, value in sent_numbers.items():
            found[name].fill(str(value))
        for label, (text, _) in texts.items():
            page.get_by_role("textbox", name=label).fill(text)
        page.get_by_role("textbox", name="System prompt").fill("Count.")
        page.get_by_role("combobox", name="Reasoning").select_option("off")
        sent = ask(page, "abc")
        assert sent["messages"][0] == {"role": "system", "content": "Count."}
        expected: dict[str, Any] = {**sent_numbers, "enable_thinking": False, "max_tokens": 6}
        for _, fields in texts.values():
            expected |= fields
        assert {name: sent[name] for name in expected} == expected
        assert re.fullmatch(r"-?\d+", page.locator(".formatted").inner_text())
        # They are there again, for a new conversation too.
        page.reload()
        page.get_by_role("link", name="New chat").click()
        expect(page.get_by_role("textbox", name="System prompt")).to_have_value("Count.")
        assert ask(page, "abc")["top_k"] == 1
        # What cannot be sent is said in a line, and the message stays.
        page.get_by_text("Stop texts, JSON").click()
        page.get_by_role("textbox", name="JSON schema").fill("{")
        say(page, "kept")
        expect(page.get_by_role("alert")).to_contain_text("JSON schema is not valid JSON")
        expect(page.get_by_role("textbox", name="Message")).to_have_value("kept")
        page.get_by_role("button", name="Reset to").click()
        assert not set(ask(page, "abc")) & (set(sent_numbers) | {"json_schema", "stop", "enable_thinking"})


def test_reasoning_is_folded(browser: Browser) -> None:
    with thinking() as running, visiting(browser, f"{running.url}/") as page:
        say(page, "What is 2 + 2?")
        expect(page.locator(".formatted")).to_have_text(ANSWER)
        thoughts = page.locator(".thoughts")
        expect(thoughts.locator(".plain")).to_be_hidden()
        thoughts.locator("summary").click()
        expect(thoughts.locator(".plain")).to_have_text("h" * 20)
        page.get_by_role("button", name="Tokens").click()
        expect(thoughts.locator(".tokens")).to_have_text("h" * 20)
        expect(page.locator(".written > .tokens")).to_have_text(ANSWER)


def test_calls_are_shown_and_their_results_sent(browser: Browser) -> None:
    with (
        hosted(lambda: scripted(TEMPLATE, target=saying(SAID))) as running,
        visiting(browser, f"{running.url}/") as page,
    ):
        page.get_by_text("Stop texts, JSON").click()
        page.get_by_role("textbox", name="Tools").fill(json.dumps(TOOLS))
        sent = ask(page, "The weather in Rome?", most=600)
        assert sent["tools"] == TOOLS
        calls = page.locator(".call")
        expect(calls.locator("summary")).to_have_text(["Tool call: weather", "Tool call: now"])
        assert json.loads(calls.first.locator("pre").inner_text()) == {"city": "Rome", "days": 3}
        page.get_by_role("textbox", name="Result of weather").fill("Rain.")
        page.get_by_role("textbox", name="Result of now").fill("Noon.")
        with page.expect_request(PATH) as asked:
            page.get_by_role("button", name="Send results").click()
        *_, answer, first, second = body_of(asked.value)["messages"]
        assert [call["function"]["name"] for call in answer["tool_calls"]] == ["weather", "now"]
        assert [each["tool_call_id"] for each in (first, second)] == [call["id"] for call in answer["tool_calls"]]
        assert [each["content"] for each in (first, second)] == ["Rain.", "Noon."]
        wait_for_end(page)
        page.reload()
        expect(page.locator(".asked").last).to_contain_text("Tool result: Rain.")


WRITTEN: Final = r"""A table, and **bold**:

| month | days |
|---|---|
| May | 31 |

1. A list with code:
   ```bash
   echo hello
   ```

```python
def one() -> int:
    return 1
```

| a | table | that | is | much | wider | than | the | screen | of | a | phone | could | ever | be |
|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|
| 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11 | 12 | 13 | 14 | 15 |

It costs $5 or $6, and $a^2$ or \(b_1\) is a formula.

$$\frac{1}{2}$$

The end,
of two lines."""


@pytest.fixture
def writing() -> Iterator[Halting]:
    gate = Turnstile(saying(WRITTEN))
    with hosted(lambda: scripted(target=gate, drafts=False)) as running:
        yield Halting(running, gate)
        gate.open()


def test_markdown_is_shown_while_it_is_written(browser: Browser, writing: Halting, axe: str, screenshots: Path) -> None:
    with visiting(browser, f"{writing.server.url}/") as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        loaded: list[str] = []
        page.on("request", lambda request: loaded.append(request.url.rsplit("/", 1)[-1]))
        say(page, "Write.")
        formatted = page.locator(".formatted")
        writing.gate.let_until(lambda: formatted.locator("td").count() > 0)
        expect(formatted.locator("strong")).to_have_text("bold")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        # No answer has needed these yet.
        assert not {"highlight.min.js", "temml.esm.js"} & set(loaded)
        writing.gate.open()
        wait_for_end(page)
        expect(formatted.locator("table").first.locator("td")).to_have_text(["May", "31"])
        expect(formatted.locator("pre .hljs-keyword")).to_have_text(["def", "return"])
        expect(formatted.locator("math")).to_have_count(3)
        expect(formatted.locator("br")).to_have_count(1)
        expect(formatted.locator("math mfrac")).to_have_count(1)
        expect(formatted).to_contain_text("It costs $5 or $6, and ")
        expect(formatted.locator(".code-head span")).to_have_text(["bash", "python"])
        page.get_by_role("button", name="Copy code").last.click()
        assert page.evaluate("navigator.clipboard.readText()") == "def one() -> int:\n    return 1"
        page.locator(".written .tools").get_by_role("button", name="Copy").click()
        assert page.evaluate("navigator.clipboard.readText()") == WRITTEN
        for summary in page.locator("#chat-settings summary").all():
            summary.click()
        for theme in get_args(Theme):
            page.emulate_media(color_scheme=theme)
            assert not serious(page, axe)
            page.screenshot(path=screenshots / f"markdown-{theme}.png", full_page=True)
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
        page.get_by_role("button", name="Tokens").click()
        expect(page.locator(".tokens")).to_have_text(WRITTEN, use_inner_text=True)


def test_files_are_attached_and_the_context_is_counted(browser: Browser, served_script: Hosted) -> None:
    with visiting(browser, f"{served_script.url}/") as page:
        attach = page.locator("input[aria-label=Attach]")
        context = page.locator(".context")
        expect(context).to_have_text(re.compile("Context: 0 of 4,096 tokens used, 4,096 left"))
        attach.set_input_files([markdown_file("a.md", "# A\n```\nb\n```"), markdown_file("b.md", "B\n")])
        page.get_by_role("button", name="Remove b.md").click()
        for wrong in (b"\0\1", b"\xff\xfe"):
            attach.set_input_files({"name": "c.bin", "mimeType": "", "buffer": wrong})
            expect(page.get_by_role("alert")).to_contain_text("c.bin is not a text file")
            page.get_by_role("button", name="Dismiss").click()
        attach.set_input_files({"name": "d.txt", "mimeType": "", "buffer": b"d" * (5 << 20)})
        expect(page.get_by_role("alert")).to_contain_text("d.txt has 5.0 MiB: attach text files of up to 4 MiB.")
        sent = ask(page, "What is it?")
        assert sent["messages"] == [{"role": "user", "content": "a.md:\n````\n# A\n```\nb\n```\n````\n\nWhat is it?"}]
        used = served_script.answer("/v1/chat/completions", {**sent, "stream": False})["usage"]["total_tokens"]
        expect(context).to_have_text(re.compile(f"Context: {used} of 4,096 tokens used, {4096 - used:,} left"))
        expect(page.locator(".asked summary")).to_have_text(re.compile("a.md"))
        assert page.get_by_role("list", name="Attached files").count() == 0
        page.reload()
        expect(context).to_have_text(re.compile(f"Context: {used} of"))


def test_an_answer_may_be_as_long_as_the_context(browser: Browser, served_script: Hosted) -> None:
    with visiting(browser, f"{served_script.url}/") as page:
        with page.expect_request(PATH) as sent:
            say(page, "abc")
        assert body_of(sent.value)["max_tokens"] == -1


def test_a_conversation_outlives_a_reload_and_is_in_other_tabs(browser: Browser, halting: Halting) -> None:
    with visiting(browser, f"{halting.server.url}/#chat") as page:
        page.get_by_role("checkbox", name="colour tokens by drafter").check()
        say(page, "First.")
        halting.write(page, 20)
        page.keyboard.press("Escape")
        expect(page.locator(".state")).to_contain_text("stopped after")
        first = page.locator(".tokens").text_content()
        say(page, "Second.")
        expect(page.locator(".turn")).to_have_count(2)
        halting.write(page, page.locator(".tokens .round").count() + 20)
        # Others can be looked at meanwhile, and Escape is of what is shown.
        page.get_by_role("link", name="New chat").click()
        expect(page.get_by_text("An answer is being written in another conversation.")).to_be_visible()
        page.get_by_role("textbox", name="Message").press("Escape")
        page.get_by_role("link", name="another conversation").click()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        # In the middle of an answer, of which some is kept.
        kept = """async () => {
            const { createStore, values } = await import(new URL("page/vendor/idb-keyval.js", document.baseURI));
            const [conversation] = await values(createStore("paceline:/one/", "conversations"));
            return conversation.turns[1].answer.content;
        }"""
        poll(lambda: page.evaluate(kept))
        page.reload()
        expect(page.locator(".turn")).to_have_count(2)
        assert letters(page.locator(".formatted").first.inner_text()) == letters(first)
        with page.expect_request(PATH) as sent:
            page.get_by_role("button", name="Continue").click()
        messages = body_of(sent.value)["messages"]
        assert [each["content"] for each in messages[:3]] == ["First.", first, "Second."]
        assert messages[3]["content"]
        halting.write(page, 3)
        other = page.context.new_page()
        other.goto(f"{halting.server.url}/#chat")
        expect(names(other)).to_have_text(["First."])
        other.get_by_role("link", name="First.").click()
        expect(other.locator(".turn")).to_have_count(2)
        page.keyboard.press("Escape")
        expect(page.locator(".state").last).to_contain_text("stopped after")
        whole = page.locator(".tokens").last.text_content() or ""
        assert whole.startswith(messages[3]["content"])
        poll(lambda: letters(other.locator(".formatted").last.inner_text()) == letters(whole))
        other.get_by_role("button", name="Delete").click()
        other.get_by_role("button", name="Delete it").click()
        expect(names(page)).to_have_count(0)
        # So is one while it is written.
        say(page, "Third.")
        expect(names(other)).to_have_text(["Third."])
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("button", name="Delete it").click()
        halting.gate.open()
        halting.server.wait_for_nothing()
        page.reload()
        page.get_by_role("button", name="Send").wait_for()
        expect(page.get_by_text("No conversations yet.")).to_be_visible()


def test_what_was_kept_and_is_broken_does_no_harm(browser: Browser, served_script: Hosted) -> None:
    with visiting(browser, f"{served_script.url}/#chat") as page:
        page.get_by_role("button", name="Send").wait_for()
        page.evaluate(
            """async () => {
                const { set, createStore } = await import(new URL("page/vendor/idb-keyval.js", document.baseURI));
                const store = createStore("paceline:/one/", "conversations");
                const answer = { content: "*c*", calls: [null] };
                const turns = [null, 7, { parent: 9, asked: "<b>a</b>", files: 3, answer }];
                const some = { id: "e", turns, leaf: 99 };
                const all = [null, 7, "a", {}, { id: 3, turns: [] }, { id: "d", turns: 3 }, some];
                for (const [index, value] of all.entries()) await set(index, value, store);
                for (const value of ["{", "null", "7"]) localStorage.setItem("paceline:/one/settings", value);
                localStorage.setItem("paceline:/one/settings", '{"sampling": 3, "most": {"chat": "a"}, "other": 1}');
            }"""
        )
        page.reload()
        expect(names(page)).to_have_count(1)
        names(page).click()
        expect(page.locator(".formatted em")).to_have_text("c")
        ask(page, "abc")


def test_where_nothing_is_kept_the_chat_goes_on_and_says_so(browser: Browser, served_script: Hosted) -> None:
    script = "indexedDB.open = () => { throw new DOMException('it is off', 'SecurityError'); };"
    with visiting(browser, f"{served_script.url}/", before=lambda page: page.add_init_script(script)) as page:
        expect(page.get_by_role("alert")).to_contain_text("This browser keeps no conversations (it is off)")
        ask(page, "abc")
        expect(names(page)).to_have_text(["abc"])


def test_a_model_is_chosen_where_there_are_several(browser: Browser) -> None:
    def be_router(page: Page) -> None:
        """Give the router's own answers; those of a model come from one."""
        page.route(re.compile(r"/props$"), lambda route: route.fulfill(json={"role": "router"}))
        listed = [{"id": name, "status": {"value": "unloaded"}} for name in ("one", "two", "three")]
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": listed}))

    with hosted(scripted) as running, visiting(browser, f"{running.url}/", before=be_router, refusals=(503,)) as page:
        expect(page.locator(".waiting")).to_have_text("Choose a model above.")
        with page.expect_request(re.compile(r"/props\?autoload=true&model=two$")):
            page.get_by_role("combobox", name="Model").select_option("two")
        assert ask(page, "abc")["model"] == "two"
        page.reload()
        expect(page.get_by_role("combobox", name="Model")).to_have_value("two")
        # What was written and not sent stays, and a model that cannot be loaded changes nothing.
        box = page.get_by_role("textbox", name="Message")
        box.fill("def")
        refusal = {"error": {"code": 503, "message": "three cannot be loaded"}}
        page.route(re.compile(r"model=three$"), lambda route: route.fulfill(status=503, json=refusal))
        page.get_by_role("combobox", name="Model").select_option("three")
        expect(page.get_by_role("alert")).to_contain_text("three cannot be loaded")
        expect(page.get_by_role("combobox", name="Model")).to_have_value("two")
        page.get_by_role("combobox", name="Model").select_option("one")
        expect(box).to_have_value("def")
        expect(page.locator(".turn")).to_have_count(1)
        assert ask(page, "ghi")["model"] == "one"


def test_a_model_without_a_template_opens_at_the_race(browser: Browser) -> None:
    with hosted(lambda: replace(scripted(), template=None)) as running, visiting(browser, f"{running.url}/") as page:
        page.get_by_role("button", name="Start the race").wait_for()
        expect(page).to_have_title("The race · paceline")
        page.get_by_role("navigation", name="Views").get_by_role("link", name="Chat").click()
        expect(page.get_by_text("This model has no chat template")).to_be_visible()
