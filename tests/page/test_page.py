"""The page in a browser: the race, answers, keys, errors, and who cannot see or use a mouse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, get_args

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.conftest import KEY, Halting
from tests.page.visiting import PHONE, WIDE, Theme, serious, visiting
from tests.proofs import LINES
from tests.serving.hosted import Hosted

LOOKS: Final = [(size, theme) for size in (WIDE, PHONE) for theme in get_args(Theme)]


def race(page: Page) -> None:
    """Have a race run to its end; the same whenever it is run."""
    page.get_by_role("spinbutton", name="Seed").fill("7")
    page.get_by_role("button", name="Start the race").click()
    page.locator(".verdict").wait_for()


def turn_to(page: Page, view: str) -> None:
    """Turn to another view, and wait until it is there: what has the same name in the last one is still in the page."""
    page.get_by_role("navigation", name="Views").get_by_role("link", name=view).click()
    expect(page).to_have_title(f"{view} · paceline")


def ask(page: Page, text: str, most: int = 60) -> None:
    """Ask in the chat, and wait for the answer."""
    turn_to(page, "Chat")
    page.get_by_role("textbox", name="Message").wait_for()
    opener = page.get_by_role("button", name="Settings")
    if is_narrow := opener.is_visible():
        opener.click()
    page.get_by_role("checkbox", name="colour tokens by drafter").check()
    page.get_by_role("spinbutton", name="Seed").fill("7")
    page.get_by_role("spinbutton", name="Max tokens").fill(str(most))
    if is_narrow:
        page.keyboard.press("Escape")
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Rounds").wait_for()


def lane_texts(page: Page) -> list[str]:
    return [text or "" for text in page.locator(".lane .tokens").all_text_contents()]


def test_the_race_ends_with_equal_texts(browser: Browser, served_pair: Hosted) -> None:
    with visiting(browser, f"{served_pair.url}/#race") as page:
        race(page)
        plain, speculative = lane_texts(page)
        assert plain
        assert plain == speculative
        headline = page.locator(".verdict .headline").inner_text()
        gain = r"\d+(\.\d+)?×"
        assert re.fullmatch(rf"same text, ({gain}|about as fast \({gain}\))", headline), headline
        # The pair's policy drafts a fixed length, so something was drafted.
        assert page.locator(".lane.fast .src-draft").count() > 0
        assert page.locator(".lane.slow .src-draft").count() == 0
        expect(page.locator("[role=status]").last).to_have_text(re.compile("The race is over: same text"))


def test_a_race_of_two_tokens_says_that_it_is_too_short(browser: Browser, served_pair: Hosted) -> None:
    with visiting(browser, f"{served_pair.url}/#race") as page:
        page.get_by_role("spinbutton", name="Max tokens").fill("2")
        race(page)
        expect(page.locator(".verdict .headline")).to_have_text("same text, but too short for a race")
        expect(page.locator(".verdict")).to_contain_text("The answer has 2 tokens.")


DRAFTED: Final = {"drafted": 9, "gain": 2.0, "gain_low": 1.9, "gain_high": 2.2, "verify": "coupled"}


@pytest.mark.parametrize(
    ("text", "speed", "told", "headline", "detail"),
    [
        ("one two", 21.0, DRAFTED, "same text, 2.1×", "own estimate: 2.0× (1.90× to 2.2×)"),
        ("one two", 9.0, DRAFTED, "same text, 0.90×", "took more time than it saved"),
        ("one tow", 21.0, DRAFTED, "the texts differ from character 6 on", "near-tie"),
        ("one two and", 21.0, {**DRAFTED, "verify": "rejection"}, "the texts differ from character 8 on", "rejection"),
        (
            "one two",
            9.9,
            {"drafted": 0, "off_reason_text": "no draft would have paid"},
            "same text; drafts would not have paid off, so there were none",
            "Why: no draft would have paid.",
        ),
        (
            "one two",
            10.8,
            {**DRAFTED, "gain": 0.99, "gain_low": 0.92, "gain_high": 1.04},
            "same text, about as fast (1.08×)",
            "own estimate: 0.99× (0.92× to 1.04×)",
        ),
        ("one two", None, DRAFTED, "same text; too short to compare the speeds", ""),
    ],
)
def test_the_verdict_says_what_was_measured(
    browser: Browser,
    served_script: Hosted,
    text: str,
    speed: float | None,
    told: dict[str, object],
    headline: str,
    detail: str,
) -> None:
    with visiting(browser, f"{served_script.url}/#race") as page:
        verdict = page.evaluate(
            """async ([slow, fast]) => {
                const { verdictOf } = await import(new URL("page/race.js", document.baseURI));
                return verdictOf(slow, fast);
            }""",
            [{"text": "one two", "speed": 10.0}, {"text": text, "speed": speed, "speculative": told}],
        )
        assert verdict["headline"] == headline
        assert detail in verdict["details"]


def test_a_kept_seed_writes_the_same_again(browser: Browser, served_pair: Hosted) -> None:
    with visiting(browser, f"{served_pair.url}/#text") as page:
        seed = page.get_by_role("spinbutton", name="Seed")
        expect(seed).to_have_attribute("placeholder", "random")
        page.get_by_role("spinbutton", name="Max tokens").fill("40")
        texts = []
        for _ in range(2):
            with page.expect_request("**/completion") as sent:
                page.get_by_role("button", name="Generate").click()
            page.get_by_role("button", name="Rounds").wait_for()
            texts.append(page.locator(".tokens").inner_text())
            if len(texts) == 1:
                # A seed that was drawn is told, and is set once it is kept.
                used = str(sent.value.post_data_json["seed"])
                expect(seed).to_have_value("")
                page.get_by_role("checkbox", name=f"keep the last one, {used}").check()
        expect(seed).to_have_value(used)
        page.get_by_role("checkbox", name="show rejected drafts").uncheck()
        assert len(texts[0]) > 40
        assert texts[0] == texts[1]
        seed.fill("")
        seed.blur()
        expect(page.get_by_role("checkbox", name="keep the last one")).not_to_be_checked()


def test_the_replay_moves_and_can_be_skipped(browser: Browser, served_pair: Hosted) -> None:
    with visiting(browser, f"{served_pair.url}/#race", moves=True) as page:
        page.get_by_role("spinbutton", name="Max tokens").fill("300")
        page.get_by_role("button", name="Start the race").click()
        page.locator(".verdict").wait_for()
        # So slowly that a machine on which this is looked at late has a replay that is as much longer.
        page.get_by_role("combobox").select_option("1/100 of real time")
        page.get_by_role("button", name="Race again").click()
        expect(page.locator(".pace")).to_have_text("Replayed 100 times slower than it was.")
        assert page.locator(".verdict").count() == 0
        expect(page.locator("[role=status]").last).to_have_text("Both are recorded; replaying.")
        page.get_by_role("button", name="Skip to the end").click()
        page.locator(".verdict").wait_for()
        expect(page.locator("[role=status]").last).to_have_text(re.compile("The race is over"))


@pytest.mark.parametrize("way", ["Escape", "Stop"])
@pytest.mark.parametrize(
    ("view", "start", "box"),
    [
        ("The race", "Start the race", "Message"),
        ("Chat", "Send", "Message"),
        ("Text", "Generate", "Text to continue"),
    ],
)
def test_what_is_written_is_stopped_and_the_keyboard_stays_where_it_was(
    browser: Browser, halting: Halting, view: str, start: str, box: str, way: str
) -> None:
    with visiting(browser, f"{halting.server.url}/") as page:
        turn_to(page, view)
        if view == "Chat":
            page.get_by_role("checkbox", name="colour tokens by drafter").check()
        page.get_by_role("textbox", name=box).fill("abc")
        page.get_by_role("button", name=start).press("Enter")
        halting.write(page, 4)
        expect(page.get_by_role("textbox", name=box)).to_be_focused()
        if way == "Escape":
            page.keyboard.press("Escape")
        else:
            page.get_by_role("button", name="Stop").press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_have_count(0)
        expect(page.locator("[role=status]").last).to_have_text(re.compile("stopped"))
        expect(page.get_by_role("textbox", name=box)).to_be_focused()
        halting.gate.open()
        halting.server.wait_for_nothing()


def test_escape_stops_what_is_looked_at_alone(browser: Browser, halting: Halting) -> None:
    with visiting(browser, f"{halting.server.url}/") as page:
        turn_to(page, "Text")
        page.get_by_role("spinbutton", name="Max tokens").fill("60")
        page.get_by_role("button", name="Generate").click()
        halting.write(page, 4)
        turn_to(page, "Chat")
        page.keyboard.press("Escape")
        turn_to(page, "Text")
        halting.gate.open()
        expect(page.locator(".state")).to_contain_text("cut off: it reached Max tokens, 60")


def test_an_answer_may_be_as_long_as_the_context(browser: Browser, served_script: Hosted) -> None:
    with visiting(browser, f"{served_script.url}/#chat") as page:
        page.get_by_role("textbox", name="Message").fill("abc")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Send").click()
        assert sent.value.post_data_json["max_tokens"] == -1


@pytest.mark.parametrize("view", ["Chat", "Text"])
def test_an_answer_that_is_cut_off_says_so_and_goes_on(browser: Browser, halting: Halting, view: str) -> None:
    with visiting(browser, f"{halting.server.url}/") as page:
        turn_to(page, view)
        if view == "Chat":
            page.get_by_role("checkbox", name="colour tokens by drafter").check()
        halting.gate.open()
        page.get_by_role("spinbutton", name="Max tokens").fill("9")
        page.get_by_role("textbox", name="Message" if view == "Chat" else "Text to continue").fill("abc")
        page.get_by_role("button", name="Send" if view == "Chat" else "Generate").click()
        text = ""
        for _ in range(3):
            page.get_by_role("button", name="Rounds").wait_for()
            expect(page.locator(".state")).to_contain_text("9 tokens")
            expect(page.locator(".state")).to_contain_text("cut off: it reached Max tokens, 9")
            before, text = text, page.locator(".tokens").text_content() or ""
            assert text.startswith(before)
            assert len(text) > len(before)
            page.get_by_role("button", name="Continue").click()
            expect(page.locator(".tokens")).not_to_have_text(text, use_inner_text=False)


def test_a_round_is_looked_at_by_the_keyboard(browser: Browser, served_script: Hosted) -> None:
    with visiting(browser, f"{served_script.url}/") as page:
        ask(page, "abc")
        page.get_by_role("button", name="Rounds").press("Enter")
        slider = page.get_by_role("slider", name="Round")
        slider.press("Home")
        expect(page.locator(".inspector")).to_contain_text("no drafts")
        slider.press("ArrowRight")
        expect(page.locator(".round.selected")).to_have_attribute("data-round", "1")
        tree = page.get_by_role("group", name="Tree of this round's drafts")
        rects = tree.locator("rect").count()
        assert rects >= 2
        assert tree.locator("li").count() == rects
        # Siblings stand one below the other.
        assert len({tree.locator("g").nth(number).get_attribute("transform") for number in range(rects)}) == rects
        page.locator(".turn [data-round='3']").click()
        expect(slider).to_have_value("4")


def test_what_the_figures_say_is_what_the_rounds_come_to(browser: Browser, served_script: Hosted) -> None:
    with visiting(browser, f"{served_script.url}/#text") as page:
        page.get_by_role("spinbutton", name="Max tokens").fill("80")
        page.get_by_role("button", name="Generate").click()
        page.get_by_role("button", name="Rounds").wait_for()
        figures = page.get_by_role("complementary", name="Figures")
        expect(figures).to_contain_text("Where the time went")
        expect(figures).to_contain_text("Accepted, by depth of the draft")
        row = figures.get_by_role("row", name=re.compile("draft model"))
        drafted, accepted = (int(row.get_by_role("cell").nth(place).inner_text()) for place in (0, 1))
        assert 0 < accepted < drafted
        said = page.locator(".tokens .src-draft").count()
        # A character of several tokens is said by its last.
        assert 0 < said <= accepted


def test_what_a_model_writes_does_nothing(browser: Browser, served_script: Hosted) -> None:
    with visiting(browser, f"{served_script.url}/#race") as page:
        page.get_by_role("button", name="Start the race").wait_for()
        hostile = (
            "**bold** <script>window.hit=1</script><img src=x onerror='window.hit=1'><style>*{display:none}</style>"
            "<a href='javascript:window.hit=1'>link</a> [other](javascript:window.hit=1) "
            "<p style='position:fixed' onclick='window.hit=1'>text</p><form action='/x'><input name=a></form>"
            "![picture](https://example.org/x.png) [good](https://example.org/)"
        )
        markup = page.evaluate(
            """async (text) => {
                const { toBlocks } = await import(new URL("page/markdown.js", document.baseURI));
                const made = document.createElement("div");
                for (const markup of toBlocks(text)) {
                    made.append(document.createElement("div"));
                    made.lastChild.innerHTML = markup;
                }
                document.body.append(made);
                made.querySelectorAll("a:not([href]), p").forEach((each) => each.click());
                return {
                    tags: [...new Set([...made.querySelectorAll("*")].map((each) => each.localName))],
                    names: [...made.querySelectorAll("*")].flatMap((each) => each.getAttributeNames()),
                    links: [...made.querySelectorAll("[href]")].map((each) => each.href),
                    text: made.textContent,
                };
            }""",
            hostile,
        )
        assert set(markup["tags"]) == {"div", "p", "strong", "a"}
        assert set(markup["names"]) == {"href", "target", "rel"}
        assert markup["links"] == ["https://example.org/"]
        assert "<script>window.hit=1</script>" in markup["text"]
        assert page.evaluate("window.hit") is None


def test_an_answer_is_stopped(browser: Browser, served_pair: Hosted) -> None:
    with visiting(browser, f"{served_pair.url}/#text") as page:
        page.get_by_role("spinbutton", name="Max tokens").fill("100000")
        page.get_by_role("button", name="Generate").click()
        page.locator(".tokens .round").nth(5).wait_for()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".state")).to_contain_text("stopped after")
        served_pair.wait_for_nothing()
        page.get_by_role("button", name="Generate").wait_for()


def test_a_view_goes_on_while_another_is_looked_at(browser: Browser, served_pair: Hosted) -> None:
    with visiting(browser, f"{served_pair.url}/") as page:
        turn_to(page, "Text")
        page.get_by_role("spinbutton", name="Max tokens").fill("100000")
        page.get_by_role("button", name="Generate").click()
        page.locator(".tokens .round").nth(2).wait_for()
        turn_to(page, "Server")
        expect(page.locator(".place.busy, .fact")).not_to_have_count(0)
        turn_to(page, "Text")
        page.get_by_role("button", name="Rounds").wait_for()
        expect(page.locator(".state")).to_contain_text("tokens/s")


def test_an_error_is_one_line(browser: Browser, served_pair: Hosted) -> None:
    with visiting(browser, f"{served_pair.url}/#text", refusals=(400,)) as page:
        page.get_by_role("textbox", name="Text to continue").fill("word " * 3000)
        page.get_by_role("button", name="Generate").click()
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("512")
        assert "\n" not in alert.locator("span").inner_text()
        page.get_by_role("button", name="Dismiss").click()
        expect(alert).to_have_count(0)


def test_a_key_is_asked_for_and_sent(browser: Browser, locked: Hosted) -> None:
    with visiting(browser, f"{locked.url}/#race", refusals=(401,)) as page:
        page.get_by_label("API key").fill("another")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Continue").click()
        race(page)
        # It is kept for this tab, and nowhere else.
        page.reload()
        page.get_by_role("button", name="Start the race").wait_for()
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert KEY not in page.url


def test_what_is_told_aloud_is_little(browser: Browser, served_pair: Hosted) -> None:
    with visiting(browser, f"{served_pair.url}/#race") as page:
        page.get_by_role("button", name="Start the race").wait_for()
        page.evaluate(
            """() => {
                window.told = [];
                const note = () => window.told.push(document.querySelector("p[role=status]").textContent);
                const region = document.querySelector("p[role=status]");
                new MutationObserver(note).observe(region, { childList: true, characterData: true, subtree: true });
            }"""
        )
        race(page)
        told = page.evaluate("window.told")
        assert 2 <= len(told) <= 3
        assert told[0] == "Recording plain decoding."
        assert page.locator("[aria-live]:not([role=status])").count() == 0


@pytest.mark.parametrize(("size", "theme"), LOOKS)
def test_everybody_can_use_it(
    browser: Browser,
    served_pair: Hosted,
    axe: str,
    screenshots: Path,
    size: tuple[int, int],
    theme: Theme,
) -> None:
    def look(page: Page, name: str) -> None:
        found = serious(page, axe)
        assert not found, f"{name}: " + "\n".join(found)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], name
        # As if the window were as high as the page: what sticks to its edge would stand in the middle of a picture.
        height = page.evaluate("document.documentElement.scrollHeight")
        page.set_viewport_size({"width": size[0], "height": height})
        page.screenshot(path=screenshots / f"{name}-{size[0]}-{theme}.png")
        page.set_viewport_size({"width": size[0], "height": size[1]})

    with visiting(browser, f"{served_pair.url}/#race", size=size, theme=theme) as page:
        page.get_by_role("button", name="Start the race").wait_for()
        look(page, "begin")
        page.get_by_role("spinbutton", name="Max tokens").fill("120")
        race(page)
        look(page, "race")
        ask(page, "Tell me something about lists.", most=120)
        page.get_by_role("button", name="Rounds").click()
        page.get_by_role("slider", name="Round").press("ArrowRight")
        look(page, "chat")
        page.get_by_role("button", name="Delete").click()
        look(page, "delete")
        page.get_by_role("button", name="Keep it").click()
        page.get_by_role("button", name="Tokens").click()
        page.locator(".formatted").wait_for()
        look(page, "formatted")
        if size == PHONE:
            for panel in ("Conversations", "Settings"):
                page.get_by_role("button", name=panel).click()
                look(page, panel.lower())
                page.keyboard.press("Escape")
        turn_to(page, "Text")
        page.get_by_role("button", name="Generate").click()
        page.get_by_role("button", name="Rounds").wait_for()
        look(page, "text")
        turn_to(page, "Server")
        page.locator(".place").first.wait_for()
        page.locator(".fact").nth(4).wait_for()
        look(page, "server")


def test_the_page_is_there_soon(browser: Browser, served_pair: Hosted) -> None:
    times, sizes = [], []
    for _ in range(5):
        with visiting(browser, f"{served_pair.url}/") as page:
            page.get_by_role("button", name="Send").wait_for()
            times.append(page.evaluate("performance.getEntriesByName('paceline-ready')[0].startTime"))
            sizes.append(
                page.evaluate(
                    "['resource', 'navigation'].flatMap((type) => performance.getEntriesByType(type))"
                    ".filter((each) => !each.name.endsWith('/props'))"
                    ".reduce((sum, each) => sum + each.decodedBodySize, 0)"
                )
            )
    times.sort()
    LINES.append(
        f"page: ready {times[2]:.0f} ms after it was asked for ({times[0]:.0f} to {times[-1]:.0f}), {sizes[0]} bytes"
    )
    # A page without a build step: what shows markdown, code and formulas is read later, where there is any.
    assert sizes[0] < 140_000
