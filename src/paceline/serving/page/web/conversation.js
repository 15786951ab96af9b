// Chats, and texts to continue: the answer in tokens by source, with its figures beside it.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.module.js";
import { Answer } from "./answer.js";
import { Figures, speedText } from "./figures.js";
import { RoundInspector, TokenText } from "./tokens.js";
import { Settings, drawSeed, requestOf } from "./settings.js";
import { useRedraw, useTask } from "./writing.js";

/** An answer as the model meant it to look. The libraries are loaded where somebody wants that. */
function Formatted({ text }) {
  const [toMarkup, setToMarkup] = useState(null);
  useEffect(() => {
    let isHere = true;
    import("./markdown.js").then((module) => isHere && setToMarkup(() => module.toMarkup));
    return () => { isHere = false; };
  }, []);
  if (!toMarkup) return html`<p class="quiet">…</p>`;
  return html`<div class="formatted" dangerouslySetInnerHTML=${{ __html: toMarkup(text) }} />`;
}

function stateText(answer) {
  if (answer.state === "failed") return answer.error.message;
  if (answer.state === "cancelled") return `cancelled after ${answer.numTokens} tokens`;
  if (answer.state === "asked") {
    const { progress } = answer;
    return progress?.processed < progress?.total ? `reading the prompt: ${progress.processed} of ${progress.total} tokens` : "waiting";
  }
  const tokens = `${answer.numTokens} tokens, ${speedText(answer.speed)} tokens/s`;
  return answer.finish === "length" ? `${tokens}; cut off at the limit of tokens` : tokens;
}

/** An answer: its text, and one of its rounds where somebody looks closer. */
function Written({ answer, ghosts, isLooking, look }) {
  const [isFormatted, setFormatted] = useState(false);
  const [selected, setSelected] = useState(0);
  const select = (index) => {
    setSelected(index);
    look();
  };
  return html`<div class="written">
    ${isFormatted
      ? html`<${Formatted} text=${answer.content} />`
      : html`<${TokenText} rounds=${answer.rounds} ghosts=${ghosts} selected=${isLooking ? selected : -1}
          onSelect=${select} caret=${!answer.isOver} />`}
    <p class="state"><span class=${answer.state === "failed" ? "error" : "quiet"}>${stateText(answer)}</span>
      ${answer.isOver && answer.rounds.length > 0 && html`
        <button type="button" class="small" aria-pressed=${isFormatted} onClick=${() => setFormatted(!isFormatted)}>Formatted</button>
        <button type="button" class="small" aria-expanded=${isLooking} onClick=${() => look(!isLooking)}>Look closer</button>`}
    </p>
    ${isLooking && answer.isOver && html`<${RoundInspector} rounds=${answer.rounds} selected=${selected} onSelect=${setSelected} />`}
  </div>`;
}

/** What both views do: ask for one answer after the other. */
function useAnswering({ settings, change, announce, report, drawn }) {
  const [busy, run, cancel] = useTask();
  const redraw = useRedraw();
  const ask = (path, body, taken) => run(async (signal) => {
    const used = settings.isLocked ? settings : { ...settings, seed: drawSeed() };
    if (!settings.isLocked) change({ seed: used.seed });
    const answer = new Answer();
    report(null);
    taken(answer);
    announce("The answer is being written.");
    await answer.follow(path, { ...body, ...requestOf(used) }, () => { redraw(); drawn?.(); }, signal);
    if (answer.error) report(answer.error);
    announce(answer.state === "failed" ? "" : `The answer is over: ${stateText(answer)}.`);
  });
  return [busy, ask, cancel];
}

// As far below the window as what a round or two add to a conversation, in pixels.
const NEAR = 160;

/** Keep the end of a conversation in sight while it grows, unless its reader has scrolled up. */
function useFollowing() {
  const end = useRef(null);
  const follow = () => {
    if (!end.current || end.current.getBoundingClientRect().top > innerHeight + NEAR) return;
    requestAnimationFrame(() => end.current?.scrollIntoView({ block: "nearest" }));
  };
  return [end, follow];
}

export function Chat({ server, settings, change, announce, report }) {
  const [turns, setTurns] = useState([]);
  const [message, setMessage] = useState("");
  const [looking, setLooking] = useState(-1);
  const [end, follow] = useFollowing();
  const [busy, ask, cancel] = useAnswering({ settings, change, announce, report, drawn: follow });

  if (!server.props.chat_template) {
    return html`<div class="view"><h2>Chat</h2><p class="lead">This model has no chat template: it
      <a href="#text">continues texts</a> and answers no questions. To chat, start the server with a chat model, such as
      ${" "}<code>paceline serve -hf ggml-org/gemma-3-1b-it-GGUF</code>.</p></div>`;
  }
  const send = () => {
    const asked = message.trim();
    if (!asked || busy) return;
    // What an answer that failed left behind is no part of the conversation.
    const before = turns.filter((turn) => turn.answer.content);
    const messages = before.flatMap((turn) => [
      { role: "user", content: turn.asked },
      { role: "assistant", content: turn.answer.content },
    ]);
    ask("v1/chat/completions", { messages: [...messages, { role: "user", content: asked }] }, (answer) => {
      setTurns([...before, { asked, answer }]);
      setMessage("");
      setLooking(-1);
      follow();
    });
  };
  const typed = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  return html`<div class="view beside">
    <h2>Chat</h2>
    <div class="main">
      <div class="log" role="region" aria-label="Conversation">
        ${turns.length === 0 && html`<p class="quiet empty">Ask something. Each token of the answer shows who proposed it.</p>`}
        ${turns.map((turn, index) => html`<article class="turn" key=${index}>
          <p class="asked"><span class="hidden">You: </span>${turn.asked}</p>
          <${Written} answer=${turn.answer} ghosts=${settings.ghosts} isLooking=${looking === index}
            look=${(on = true) => setLooking(on ? index : -1)} />
        </article>`)}
        <div class="log-end" ref=${end}></div>
      </div>
      <div class="composer"><form class="card ask" onSubmit=${(event) => { event.preventDefault(); send(); }}>
        <label for="chat-message">Message <span class="quiet">(Enter sends, Shift+Enter begins a line)</span></label>
        <textarea id="chat-message" rows="1" value=${message} onKeyDown=${typed}
          onInput=${(event) => setMessage(event.target.value)}></textarea>
        <div class="actions">
          <button class="primary" disabled=${busy || !message.trim()}>Send</button>
          ${busy && html`<button type="button" onClick=${cancel}>Cancel</button>`}
          ${!busy && turns.length > 0 && html`<button type="button" onClick=${() => { setTurns([]); setLooking(-1); }}>New chat</button>`}
        </div>
      </form></div>
    </div>
    <div class="side">
      <section class="card" aria-label="Settings"><${Settings} name="chat" settings=${settings} change=${change} /></section>
      <${Figures} answer=${turns.at(-1)?.answer} />
    </div>
  </div>`;
}

export function Completion({ settings, change, announce, report }) {
  const [prompt, setPrompt] = useState("def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n");
  const [answer, setAnswer] = useState(null);
  const [isLooking, setLooking] = useState(false);
  const [busy, ask, cancel] = useAnswering({ settings, change, announce, report });
  const send = () => ask("completion", { prompt }, (made) => {
    setAnswer(made);
    setLooking(false);
  });
  return html`<div class="view beside">
    <h2>Text</h2>
    <div class="main">
      <form class="card ask" onSubmit=${(event) => { event.preventDefault(); send(); }}>
        <label for="text-prompt">Text to continue</label>
        <textarea id="text-prompt" rows="6" value=${prompt} onInput=${(event) => setPrompt(event.target.value)}></textarea>
        <div class="actions">
          <button class="primary" disabled=${busy || !prompt}>Continue</button>
          ${busy && html`<button type="button" onClick=${cancel}>Cancel</button>`}
        </div>
      </form>
      ${answer && html`<article class="turn card" aria-label="Answer">
        <${Written} answer=${answer} ghosts=${settings.ghosts} isLooking=${isLooking} look=${(on = true) => setLooking(on)} />
      </article>`}
    </div>
    <div class="side">
      <section class="card" aria-label="Settings"><${Settings} name="text" settings=${settings} change=${change} /></section>
      <${Figures} answer=${answer} />
    </div>
  </div>`;
}
