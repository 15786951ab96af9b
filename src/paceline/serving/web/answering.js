// What chats and texts have in common: asking for an answer, and showing it.

import { Component, html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.module.js";
import { Answer } from "./answer.js";
import { gainText, speedText } from "./figures.js";
import { RoundInspector, TokenText } from "./tokens.js";
import { drawSeed, requestOf } from "./settings.js";
import { useRedraw, useTask } from "./writing.js";

/** Put a text on the clipboard. Pages of plain HTTP from another machine have the old way alone. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = Object.assign(document.createElement("textarea"), { value: text, className: "hidden" });
    const { activeElement } = document;
    // In front of all else, also of what is open over the page.
    (document.querySelector("dialog[open]") ?? document.body).append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    activeElement?.focus();
  }
}

export function CopyButton({ text, announce }) {
  const [isDone, setDone] = useState(false);
  useEffect(() => {
    const timer = isDone && setTimeout(() => setDone(false), 2000);
    return () => clearTimeout(timer);
  }, [isDone]);
  const copy = async () => {
    await copyText(text);
    setDone(true);
    announce("Copied.");
  };
  return html`<button type="button" class="small" onClick=${copy}>${isDone ? "Copied" : "Copy"}</button>`;
}

/** Markup of one paragraph, list or the like, drawn anew only where it changed. Each block of code gets a button. */
class Block extends Component {
  shouldComponentUpdate({ markup }) {
    return markup !== this.props.markup;
  }

  componentDidMount() {
    for (const pre of this.base.querySelectorAll("pre")) {
      const head = Object.assign(document.createElement("div"), { className: "code-head" });
      const language = Object.assign(document.createElement("span"), {
        textContent: /language-(\S+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "",
      });
      const button = Object.assign(document.createElement("button"), { type: "button", className: "small" });
      const label = (done) => {
        button.textContent = done;
        button.setAttribute("aria-label", `${done} code`);
      };
      label("Copy");
      button.addEventListener("click", async () => {
        await copyText(pre.textContent.replace(/\n$/, ""));
        label("Copied");
        this.props.announce("Copied.");
        setTimeout(() => label("Copy"), 2000);
      });
      head.append(language, button);
      pre.before(head);
      // What scrolls has to be within the keyboard's reach.
      pre.tabIndex = 0;
    }
  }

  componentDidUpdate() {
    this.componentDidMount();
  }

  render({ markup }) {
    return html`<div dangerouslySetInnerHTML=${{ __html: markup }} />`;
  }
}

// Of the time in which a text is written, at most this part goes into formatting it.
const FORMATTING_SHARE = 0.2;

/** A text in markdown. What reads it is loaded with the first one. */
export function Formatted({ text, isWriting, announce }) {
  const [markdown, setMarkdown] = useState(null);
  const [count, setCount] = useState(0);
  const made = useRef({ blocks: null, until: 0 });
  useEffect(() => {
    let forget = () => {};
    let isHere = true;
    import("./markdown.js").then((module) => {
      if (!isHere) return;
      setMarkdown(module);
      forget = module.whenMore(() => setCount((before) => before + 1));
    });
    return () => {
      isHere = false;
      forget();
    };
  }, []);
  const { current } = made;
  const now = performance.now();
  if (markdown && (current.text !== text || current.count !== count) && !(isWriting && now < current.until)) {
    Object.assign(current, { blocks: markdown.toBlocks(text), text, count });
    current.until = now + (performance.now() - now) / FORMATTING_SHARE;
  }
  const { blocks } = current;
  if (!blocks) return html`<div class="formatted plain">${text}</div>`;
  return html`<div class="formatted">
    ${blocks.map((markup, index) => html`<${Block} key=${index} markup=${markup} announce=${announce} />`)}
  </div>`;
}

function cutText(answer) {
  if (answer.numTokens === answer.most) return `it reached Max tokens, ${answer.most}`;
  return "the context is full, or its time was over";
}

// A difference that nobody notices.
const LEVEL = 0.03;

/** What became of an answer, in a line. */
export function stateText(answer) {
  if (answer.state === "failed") return answer.error.message;
  if (answer.state === "cancelled") return `stopped after ${answer.numTokens} tokens`;
  if (answer.state === "kept") return answer.note;
  if (answer.state === "asked") {
    const { progress } = answer;
    return progress?.processed < progress?.total ? `reading the prompt: ${progress.processed} of ${progress.total} tokens` : "waiting";
  }
  // An estimate that may be either way stands beside the answer alone.
  const { gain: { expected, low, high } = {} } = answer.gain ? answer : {};
  const isLevel = Math.abs(expected - 1) < LEVEL;
  const gain = low > 1 || high < 1 ? `, ${isLevel ? "" : `${gainText(expected)} `}as fast as plain decoding` : "";
  const tokens = `${answer.numTokens} tokens, ${speedText(answer.speed)} tokens/s${gain}`;
  return answer.finish === "length" ? `${tokens}; cut off: ${cutText(answer)}` : tokens;
}

function Reasoning({ answer, asTokens, ghosts }) {
  const { reasoning } = answer;
  if (!reasoning) return null;
  const isThinking = !answer.isOver && !answer.content && !answer.calls.length;
  return html`<details class="thoughts"><summary>${isThinking ? "Reasoning…" : "Reasoning"}
      <span class="quiet"> (${reasoning.trim().split(/\s+/).length} words)</span></summary>
    ${asTokens
      ? html`<${TokenText} kind="reasoning" beginning=${answer.beginning.reasoning} rounds=${answer.rounds} ghosts=${ghosts} />`
      : html`<p class="plain">${reasoning}</p>`}
  </details>`;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is not there as a whole.
    return text;
  }
}

/** An answer: reasoning, text, calls, and what it came to. `buttons` stand below it once it is over. */
export function Written({ answer, settings, view, change, isLooking, look, announce, buttons }) {
  const [selected, setSelected] = useState(0);
  const select = (index) => {
    setSelected(index);
    look(true);
  };
  const { ghosts } = settings;
  const hasRounds = answer.rounds.length > 0;
  const asTokens = hasRounds && (settings.tokens[view] || isLooking);
  const showTokens = (on) => {
    change({ tokens: { ...settings.tokens, [view]: on } });
    if (!on) look(false);
  };
  return html`<div class="written">
    <${Reasoning} answer=${answer} asTokens=${asTokens} ghosts=${ghosts} />
    ${asTokens
      ? html`<${TokenText} kind="content" beginning=${answer.beginning.content} rounds=${answer.rounds} ghosts=${ghosts}
          selected=${isLooking ? selected : -1} onSelect=${select} caret=${!answer.isOver} />`
      : view === "text" ? html`<p class="tokens">${answer.content}</p>`
        : html`<${Formatted} text=${answer.content} isWriting=${!answer.isOver} announce=${announce} />`}
    ${!asTokens && !answer.isOver && html`<span class="caret" aria-hidden="true"></span>`}
    ${answer.calls.map((call, index) => html`<details class="call" key=${index} open>
      <summary>Tool call: <code>${call.name}</code></summary><pre tabindex="0">${indented(call.arguments)}</pre></details>`)}
    <p class="state ${answer.state === "failed" ? "error" : "quiet"}">${stateText(answer)}</p>
    ${answer.isOver && html`<div class="actions tools">
      ${buttons}
      ${hasRounds && html`<button type="button" class="small" aria-pressed=${asTokens}
        title="Colour each token by the drafter that proposed it" onClick=${() => showTokens(!asTokens)}>Tokens</button>
      <button type="button" class="small" aria-expanded=${isLooking} title="Go through this answer round by round"
        onClick=${() => look(!isLooking)}>Rounds</button>`}
    </div>`}
    ${isLooking && answer.isOver && hasRounds && html`<${RoundInspector} rounds=${answer.rounds} selected=${selected} onSelect=${setSelected} />`}
  </div>`;
}

/**
 * Ask for one answer after the other: [busy, ask, cancel]. `ask(path, body, taken, { beginning, isAnew })` hands the answer to
 * `taken` before its first token, and resolves once it is over. `isAnew`: with another seed, also where one is kept.
 */
export function useAnswering({ view, settings, change, announce, report, isShown, drawn }) {
  const [busy, run, cancel] = useTask(isShown);
  const redraw = useRedraw();
  const latest = useRef(null);
  latest.current = settings;
  const ask = (path, body, taken, { beginning, isAnew = false } = {}) => run(async (signal) => {
    const given = latest.current;
    const used = given.isLocked && !isAnew ? given : { ...given, seed: drawSeed() };
    report(null);
    let sampled;
    try {
      sampled = requestOf(used, view);
    } catch (error) {
      report(error);
      return;
    }
    if (!given.isLocked) change({ seed: used.seed });
    const answer = new Answer(beginning);
    taken(answer);
    announce("The answer is being written.");
    await answer.follow(path, { ...body, ...sampled }, () => { redraw(); drawn?.(); }, signal);
    answer.note = stateText(answer);
    if (answer.error) report(answer.error);
    announce(answer.state === "failed" ? "" : `The answer is complete: ${answer.note}.`);
  });
  return [busy, ask, cancel];
}
