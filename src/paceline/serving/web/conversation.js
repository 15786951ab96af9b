// Chats, and texts to continue: the answer in tokens by source, with its figures beside it.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.module.js";
import { Answer } from "./answer.js";
import { Figures, speedText } from "./figures.js";
import { keepTurns, keptTurns } from "./keeping.js";
import { RoundInspector, TokenText } from "./tokens.js";
import { Settings, drawSeed, requestOf } from "./settings.js";
import { useFocusKept, useRedraw, useTask } from "./writing.js";

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
  if (answer.state === "kept") return answer.isCut ? "from before, and not at its end" : "from before";
  if (answer.state === "asked") {
    const { progress } = answer;
    return progress?.processed < progress?.total ? `reading the prompt: ${progress.processed} of ${progress.total} tokens` : "waiting";
  }
  const tokens = `${answer.numTokens} tokens, ${speedText(answer.speed)} tokens/s`;
  if (answer.finish !== "length") return tokens;
  return `${tokens}; cut off: ${answer.numTokens === answer.most ? `Max tokens is ${answer.most}` : "the context is full, or its time was over"}`;
}

/** An answer: its text, and one of its rounds where somebody looks closer. `goOn` has one that was cut off written on. */
function Written({ answer, ghosts, isLooking, look, goOn }) {
  const [isFormatted, setFormatted] = useState(false);
  const [selected, setSelected] = useState(0);
  const select = (index) => {
    setSelected(index);
    look();
  };
  return html`<div class="written">
    ${isFormatted
      ? html`<${Formatted} text=${answer.content} />`
      : html`<${TokenText} beginning=${answer.beginning} rounds=${answer.rounds} ghosts=${ghosts} selected=${isLooking ? selected : -1}
          onSelect=${select} caret=${!answer.isOver} />`}
    <p class="state"><span class=${answer.state === "failed" ? "error" : "quiet"}>${stateText(answer)}</span>
      ${goOn && answer.isCut && html`<button type="button" class="small" onClick=${goOn}>Go on</button>`}
      ${answer.isOver && answer.content && html`
        <button type="button" class="small" aria-pressed=${isFormatted} onClick=${() => setFormatted(!isFormatted)}>Formatted</button>`}
      ${answer.isOver && answer.rounds.length > 0 && html`
        <button type="button" class="small" aria-expanded=${isLooking} onClick=${() => look(!isLooking)}>Look closer</button>`}
    </p>
    ${isLooking && answer.isOver && html`<${RoundInspector} rounds=${answer.rounds} selected=${selected} onSelect=${setSelected} />`}
  </div>`;
}

/** What both views do: ask for one answer after the other. */
function useAnswering({ view, settings, change, announce, report, isShown, drawn }) {
  const [busy, run, cancel] = useTask(isShown);
  const redraw = useRedraw();
  const ask = (path, body, taken, beginning) => run(async (signal) => {
    const used = settings.isLocked ? settings : { ...settings, seed: drawSeed() };
    if (!settings.isLocked) change({ seed: used.seed });
    const answer = new Answer(beginning);
    report(null);
    taken(answer);
    announce("The answer is being written.");
    await answer.follow(path, { ...body, ...requestOf(used, view) }, () => { redraw(); drawn?.(); }, signal);
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

function messagesOf(turns) {
  return turns.flatMap(({ asked, answer }) => [
    { role: "user", content: asked },
    { role: "assistant", content: answer.content },
  ]);
}

/** Whether to begin anew, which erases what there is. */
function NewChat({ begin }) {
  const dialog = useRef(null);
  const close = () => dialog.current.close();
  return html`<button type="button" onClick=${() => dialog.current.showModal()}>New chat</button>
    <dialog class="card" ref=${dialog} aria-labelledby="chat-erase">
      <p id="chat-erase">Erase this conversation? Nothing else has kept it.</p>
      <div class="actions">
        <button type="button" onClick=${close}>Keep it</button>
        <button type="button" onClick=${() => { close(); begin(); }}>Erase it</button>
      </div>
    </dialog>`;
}

export function Chat({ server, settings, change, announce, report, isShown }) {
  const [kept] = useState(() => keptTurns().map((turn) => ({ asked: turn.asked, answer: Answer.kept(turn) })));
  const [turns, setTurns] = useState(kept);
  const [message, setMessage] = useState("");
  const [looking, setLooking] = useState(-1);
  const [end, follow] = useFollowing();
  const [busy, ask, cancel] = useAnswering({ view: "chat", settings, change, announce, report, isShown, drawn: follow });
  const box = useFocusKept(isShown);

  useEffect(() => {
    // A tab in which nothing was said leaves what another one keeps.
    if (turns === kept) return undefined;
    const keep = () => keepTurns(turns.map(({ asked, answer }) => ({ asked, text: answer.content, finish: answer.finish })));
    keep();
    addEventListener("pagehide", keep);
    return () => removeEventListener("pagehide", keep);
  }, [turns, busy]);

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
    ask("v1/chat/completions", { messages: [...messagesOf(before), { role: "user", content: asked }] }, (answer) => {
      setTurns([...before, { asked, answer }]);
      setMessage("");
      setLooking(-1);
      follow();
    });
  };
  const goOn = () => {
    const { asked, answer: { content } } = turns.at(-1);
    ask("v1/chat/completions", { messages: messagesOf(turns), continue_final_message: true }, (answer) => {
      setTurns([...turns.slice(0, -1), { asked, answer }]);
      setLooking(-1);
    }, content);
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
            look=${(on = true) => setLooking(on ? index : -1)} goOn=${!busy && index === turns.length - 1 && goOn} />
        </article>`)}
        <div class="log-end" ref=${end}></div>
      </div>
      <div class="composer"><form class="card ask" onSubmit=${(event) => { event.preventDefault(); send(); }}>
        <label for="chat-message">Message <span class="quiet">(Enter sends, Shift+Enter begins a line)</span></label>
        <textarea id="chat-message" rows="1" ref=${box} value=${message} onKeyDown=${typed}
          onInput=${(event) => setMessage(event.target.value)}></textarea>
        <div class="actions">
          <button class="primary" disabled=${busy || !message.trim()}>Send</button>
          ${busy && html`<button type="button" aria-keyshortcuts="Escape" title="Escape" onClick=${cancel}>Cancel</button>`}
          ${!busy && turns.length > 0 && html`<${NewChat} begin=${() => { setTurns([]); setLooking(-1); }} />`}
        </div>
      </form></div>
    </div>
    <div class="side">
      <section class="card" aria-label="Settings"><${Settings} name="chat" settings=${settings} change=${change} /></section>
      <${Figures} answer=${turns.at(-1)?.answer} />
    </div>
  </div>`;
}

export function Completion({ settings, change, announce, report, isShown }) {
  const [prompt, setPrompt] = useState("def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n");
  const [{ begun, answer }, setWritten] = useState({ begun: "", answer: null });
  const [isLooking, setLooking] = useState(false);
  const [busy, ask, cancel] = useAnswering({ view: "text", settings, change, announce, report, isShown });
  const box = useFocusKept(isShown);
  const write = (from, beginning) => ask("completion", { prompt: from + beginning }, (made) => {
    setWritten({ begun: from, answer: made });
    setLooking(false);
  }, beginning);
  return html`<div class="view beside">
    <h2>Text</h2>
    <div class="main">
      <form class="card ask" onSubmit=${(event) => { event.preventDefault(); write(prompt, ""); }}>
        <label for="text-prompt">Text to continue</label>
        <textarea id="text-prompt" rows="6" ref=${box} value=${prompt} onInput=${(event) => setPrompt(event.target.value)}></textarea>
        <div class="actions">
          <button class="primary" disabled=${busy || !prompt}>Continue</button>
          ${busy && html`<button type="button" aria-keyshortcuts="Escape" title="Escape" onClick=${cancel}>Cancel</button>`}
        </div>
      </form>
      ${answer && html`<article class="turn card" aria-label="Answer">
        <${Written} answer=${answer} ghosts=${settings.ghosts} isLooking=${isLooking} look=${(on = true) => setLooking(on)}
          goOn=${!busy && (() => write(begun, answer.content))} />
      </article>`}
    </div>
    <div class="side">
      <section class="card" aria-label="Settings"><${Settings} name="text" settings=${settings} change=${change} /></section>
      <${Figures} answer=${answer} />
    </div>
  </div>`;
}
