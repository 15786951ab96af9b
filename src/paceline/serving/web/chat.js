// Chats: conversations that the browser keeps, answers in markdown or in tokens by source, and their figures.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact-standalone.module.js";
import { CopyButton, Written, useAnswering } from "./answering.js";
import { Answer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { Figures } from "./figures.js";
import { dropConversation, keepConversation, keptConversations } from "./keeping.js";
import { Box, Settings } from "./settings.js";
import { useFocusKept } from "./writing.js";

const PATH = "v1/chat/completions";

// As far below the window as what a round or two add to a conversation, in pixels.
const NEAR = 160;

/** Keep the end of a conversation in sight while it grows, unless its reader has scrolled up. */
function useFollowing() {
  const end = useRef(null);
  const follow = (always = false) => {
    if (!end.current || (!always && end.current.getBoundingClientRect().top > innerHeight + NEAR)) return;
    requestAnimationFrame(() => end.current?.scrollIntoView({ block: "nearest" }));
  };
  return [end, follow];
}

function save(name, content) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href: url, download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

// Larger ones fill the context of most models; what they have in common is that nobody meant to send them.
const MAX_FILE_BYTES = 4 << 20;

/** Return a file as { name, text }, or throw an `Error` that says in a line why that is none. */
async function readText(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} has ${(file.size / (1 << 20)).toFixed(1)} MiB: attach text files of up to 4 MiB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // Below.
  }
  throw new Error(`${file.name} is not a text file: attach text in UTF-8.`);
}

/** A button that opens the system's choice of files. */
function FileButton({ label, accept, multiple, take, disabled }) {
  const input = useRef(null);
  return html`<button type="button" disabled=${disabled} onClick=${() => input.current.click()}>${label}</button>
    <input type="file" hidden ref=${input} accept=${accept} multiple=${multiple} aria-label=${label}
      onChange=${(event) => { take([...event.target.files]); event.target.value = ""; }} />`;
}

/** All conversations that the browser keeps, the latest first: [conversations, keep, drop]. */
function useConversations(report) {
  const [all, setAll] = useState(null);
  const channel = useRef(null);
  const failed = useRef(false);
  const attempt = async (work) => {
    try {
      return await work();
    } catch (error) {
      // Said once.
      if (!failed.current) report(new Error(`This browser keeps no conversations (${error.message}): export what you need before you close the tab.`));
      failed.current = true;
      return undefined;
    }
  };
  const load = async () => {
    const kept = await attempt(keptConversations);
    const found = kept?.map((each) => Conversation.read(each)).filter(Boolean);
    // What this tab has opened stays as it is, with all its figures, unless another tab has changed it.
    setAll((before) => found?.map((each) => before?.find((other) => other.id === each.id && other.updated >= each.updated) ?? each) ?? before ?? []);
  };
  useEffect(() => {
    load();
    channel.current = new BroadcastChannel("paceline-conversations");
    channel.current.onmessage = load;
    return () => channel.current.close();
  }, []);
  // One that is deleted while it is written stays deleted.
  const deleted = useRef(new Set());
  const keep = async (conversation, isNew = false) => {
    if (deleted.current.has(conversation.id)) return;
    setAll((before) => [conversation, ...(before ?? []).filter((each) => each.id !== conversation.id)]);
    await attempt(() => keepConversation(conversation));
    if (isNew) channel.current?.postMessage("kept");
  };
  const drop = async (conversation) => {
    deleted.current.add(conversation.id);
    setAll((before) => before.filter((each) => each !== conversation));
    await attempt(() => dropConversation(conversation.id));
    channel.current?.postMessage("dropped");
  };
  const sorted = useMemo(() => all && [...all].sort((one, other) => other.updated - one.updated), [all]);
  return [sorted, keep, drop];
}

function dayText(time) {
  const day = new Date(time);
  const isToday = day.toDateString() === new Date().toDateString();
  return isToday ? day.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : day.toLocaleDateString();
}

function hideList() {
  const list = document.getElementById("conversations");
  if (list?.matches(":popover-open")) list.hidePopover();
}

/** Closes what is open over the conversation where there is no room beside it. */
function Closer({ target }) {
  return html`<button type="button" class="small closer" popovertarget=${target} popovertargetaction="hide">Close</button>`;
}

function ConversationList({ all, current, take, begin }) {
  const [search, setSearch] = useState("");
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = words.length ? all.filter((each) => each.has(words)) : all;
  return html`<nav class="list card" id="conversations" popover="auto" aria-label="Conversations">
    <${Closer} target="conversations" />
    <div class="actions">
      <a class="button primary" href="#chat" aria-keyshortcuts="Control+Shift+O" title="Ctrl+Shift+O" onClick=${begin}>New chat</a>
      <${FileButton} label="Import" accept=".json,application/json" multiple take=${take} />
      ${all.length > 0 && html`<button type="button" onClick=${() => save("conversations", { conversations: all.map((each) => each.exported()) })}>Export all</button>`}
    </div>
    <input id="search" type="search" aria-label="Search conversations" aria-keyshortcuts="Control+K" placeholder="Search (Ctrl+K)" value=${search}
      onInput=${(event) => setSearch(event.target.value)} />
    ${!shown.length && html`<p class="quiet">${words.length ? "No conversation has these words." : "No conversations yet."}</p>`}
    <ul>${shown.map((each) => html`<li key=${each.id}><a href=${`#chat/${each.id}`} aria-current=${each === current ? "true" : undefined}>
      <span class="name">${each.name}</span> <span class="quiet">${dayText(each.updated)}</span></a></li>`)}</ul>
  </nav>`;
}

/** Return a reference to what gets the focus once, as soon as it appears: no key is lost before. */
function useFirstFocus() {
  const element = useRef(null);
  useLayoutEffect(() => element.current.focus(), []);
  return element;
}

/** Have `cancel` called by Escape, which then does nothing else. */
function onEscape(cancel) {
  return (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    cancel();
  };
}

function NameForm({ conversation, done, cancel }) {
  const [name, setName] = useState(conversation.name);
  const box = useFirstFocus();
  return html`<form class="head" onSubmit=${(event) => { event.preventDefault(); done(name.trim()); }} onKeyDown=${onEscape(cancel)}>
    <input aria-label="Name of the conversation" value=${name} ref=${box} onInput=${(event) => setName(event.target.value)} />
    <button class="small">Save</button><button type="button" class="small" onClick=${cancel}>Cancel</button>
  </form>`;
}

/** The head of a conversation: its name, and what can be done with it. */
function Head({ conversation, keep, erase, isKept }) {
  const [isNaming, setNaming] = useState(false);
  const dialog = useRef(null);
  const close = () => dialog.current.close();
  if (isNaming) {
    const rename = (title) => {
      Object.assign(conversation, { title, updated: Date.now() });
      keep(conversation, true);
      setNaming(false);
    };
    return html`<${NameForm} conversation=${conversation} done=${rename} cancel=${() => setNaming(false)} />`;
  }
  return html`<div class="head"><h2 title=${conversation.name}>${conversation.name}</h2>
    ${isKept && html`<div class="actions">
      <button type="button" class="small" onClick=${() => setNaming(true)}>Rename</button>
      <button type="button" class="small" onClick=${() => save(conversation.name, conversation.exported())}>Export</button>
      <button type="button" class="small" onClick=${() => dialog.current.showModal()}>Delete</button>
    </div>
    <dialog class="card" ref=${dialog} aria-labelledby="chat-delete">
      <p id="chat-delete">Delete “${conversation.name}”? There is no other copy of it.</p>
      <div class="actions">
        <button type="button" onClick=${close}>Keep it</button>
        <button type="button" onClick=${() => { close(); erase(); }}>Delete it</button>
      </div>
    </dialog>`}
  </div>`;
}

/** Have `send` called by Enter; Shift+Enter starts a new line. */
function onEnter(event, send) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

/** A text that is changed in place. */
function Editor({ label, text, action, verb, done, cancel }) {
  const [value, setValue] = useState(text);
  const box = useFirstFocus();
  const finish = () => { if (value.trim()) done(value); };
  return html`<form class="editor" onKeyDown=${onEscape(cancel)} onSubmit=${(event) => { event.preventDefault(); finish(); }}>
    <textarea aria-label=${label} aria-describedby="editor-keys" onKeyDown=${(event) => onEnter(event, finish)} rows=${Math.min(12, value.split("\n").length + 1)} value=${value} ref=${box}
      onInput=${(event) => setValue(event.target.value)}></textarea>
    <div class="actions"><button class="small" disabled=${!value.trim()}>${action}</button>
      <button type="button" class="small" onClick=${cancel}>Cancel</button>
      <span class="quiet" id="editor-keys">Enter ${verb}, Shift+Enter starts a new line, Escape cancels</span></div>
  </form>`;
}

/** What tools returned, typed by hand: one box for each call. */
function Results({ calls, send }) {
  const [texts, setTexts] = useState({});
  return html`<form class="editor" onSubmit=${(event) => { event.preventDefault(); send(calls.map(({ id }, index) => ({ id, text: texts[index] ?? "" }))); }}>
    ${calls.map(({ name }, index) => html`<label>Result of ${name}
      <textarea rows="2" value=${texts[index] ?? ""} onInput=${(event) => setTexts({ ...texts, [index]: event.target.value })}></textarea></label>`)}
    <div class="actions"><button class="small">Send results</button></div>
  </form>`;
}

function Asked({ asked, files, results }) {
  return html`<div class="asked"><span class="hidden">You: </span>
    ${files.map(({ name, text }) => html`<details><summary>${name} <span class="quiet">(${text.length.toLocaleString("en")} characters)</span></summary>
      <pre tabindex="0">${text}</pre></details>`)}
    ${results.map(({ text }) => html`<p><span class="quiet">Tool result: </span>${text}</p>`)}
    ${asked && html`<p>${asked}</p>`}
  </div>`;
}

function Context({ used, whole }) {
  if (!whole) return null;
  const count = (tokens) => tokens.toLocaleString("en");
  return html`<p class="context quiet"><meter min="0" max=${whole} high=${0.85 * whole} value=${used} aria-label="Context used"></meter>
    Context: <span class="num">${count(used)}</span> of <span class="num">${count(whole)}</span> tokens used, <span class="num">${count(Math.max(0, whole - used))}</span> left</p>`;
}

export function Chat({ server, settings, change, announce, report, isShown, place }) {
  const [all, keep, drop] = useConversations(report);
  const [fresh, setFresh] = useState(() => new Conversation({ system: settings.system }));
  const [drafts, setDrafts] = useState({});
  const [looking, setLooking] = useState(-1);
  const [editing, setEditing] = useState(null);
  const [writing, setWriting] = useState("");
  const [, setVersion] = useState(0);
  const [end, follow] = useFollowing();
  const current = (place && (all?.find((each) => each.id === place) ?? (fresh.id === place ? fresh : null))) || fresh;
  const isKept = current.turns.length > 0;
  const isHere = isShown && writing === current.id;
  const saver = useRef(0);
  const writingNow = useRef(null);

  // While an answer is written it is kept every second: where the page is left it would be too late.
  const keepSoon = (conversation) => {
    saver.current ||= setTimeout(() => { saver.current = 0; keep(conversation); }, 1000);
  };
  const [busy, ask, cancel] = useAnswering({
    view: "chat", settings, change, announce, report, isShown: isShown && (!writing || isHere), drawn: () => { follow(); keepSoon(writingNow.current); },
  });
  const box = useFocusKept(isShown);
  // A touch screen would open its keyboard over the page.
  const focusBox = () => { if (!matchMedia("(pointer: coarse)").matches) box.current?.focus({ preventScroll: true }); };

  // Whoever has begun elsewhere on the page stays there.
  useEffect(() => {
    if (isShown && ["BODY", "MAIN"].includes(document.activeElement.tagName)) focusBox();
  }, []);

  // Another conversation is shown from its end on.
  useEffect(() => {
    setLooking(-1);
    setEditing(null);
    hideList();
    if (!place && fresh.turns.length) setFresh(new Conversation({ system: settings.system }));
    if (isKept) follow(true);
    if (place && all && current.id !== place) history.replaceState(null, "", "#chat");
  }, [place, all === null]);

  useEffect(() => {
    if (!isShown) return undefined;
    const pressed = (event) => {
      if (!(event.ctrlKey || event.metaKey)) return;
      const key = event.key.toLowerCase();
      if (key === "k" || (key === "o" && event.shiftKey)) event.preventDefault();
      if (key === "o" && event.shiftKey) {
        location.hash = "chat";
        box.current?.focus();
      }
      if (key === "k") {
        const list = document.getElementById("conversations");
        if (getComputedStyle(list).display === "none") list.showPopover();
        document.getElementById("search").focus();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [isShown]);

  if (!server.props.chat_template) {
    return html`<div class="view"><h2>Chat</h2><p class="lead">This model has no chat template: it
      <a href="#text">continues texts</a> and answers no questions. To chat, start the server with a chat model, such as
      ${" "}<code>paceline serve -hf ggml-org/gemma-3-1b-it-GGUF</code>.</p></div>`;
  }

  const draft = drafts[current.id] ?? { text: "", files: [] };
  const setDraft = (changes) => setDrafts((before) => ({ ...before, [current.id]: { ...draft, ...before[current.id], ...changes } }));

  /** Have the turn at an index answered; `taken` puts the answer in its place. */
  const answer = async (conversation, messages, taken, options) => {
    if (busy) return;
    setEditing(null);
    setLooking(-1);
    setWriting(conversation.id);
    await ask(PATH, messages, (made) => {
      writingNow.current = conversation;
      taken(made);
      keep(conversation, true);
      if (location.hash !== `#chat/${conversation.id}` && conversation === current) {
        history.replaceState(null, "", `#chat/${conversation.id}`);
        dispatchEvent(new HashChangeEvent("hashchange"));
      }
      follow(true);
    }, options);
    clearTimeout(saver.current);
    saver.current = 0;
    writingNow.current = null;
    setWriting("");
    conversation.updated = Date.now();
    if (conversation.turns.length) keep(conversation, true);
  };
  /** Add a turn and have it answered. */
  const send = (turn, options) => {
    const conversation = current;
    const added = { parent: conversation.end, ...turn };
    answer(conversation, { messages: conversation.messagesWith(added) }, (made) => {
      conversation.add({ ...added, answer: made });
      if (!options) setDraft({ text: "", files: [] });
    }, options);
  };
  const sendDraft = () => {
    const asked = draft.text.trim();
    if ((!asked && !draft.files.length) || busy) return;
    send({ asked, files: draft.files });
  };
  const goOn = (index) => {
    const { [index]: turn } = current.turns;
    const { content, reasoning } = turn.answer;
    answer(current, { messages: current.messages(index, { continues: true }), continue_final_message: true },
      (made) => { turn.answer = made; current.updated = Date.now(); }, { beginning: { content, reasoning } });
  };
  const editAnswer = (index, content) => {
    const { [index]: turn } = current.turns;
    turn.answer = Answer.kept({ ...turn.answer.toJSON(), content, finish: null, note: "edited" });
    setEditing(null);
    keep(current);
  };
  const show = (index) => {
    current.choose(index);
    setLooking(-1);
    keep(current);
  };
  const attach = async (given) => {
    for (const file of given) {
      try {
        const read = await readText(file);
        setDrafts((before) => {
          const { text = "", files = [] } = before[current.id] ?? {};
          return { ...before, [current.id]: { text, files: [...files, read] } };
        });
      } catch (error) {
        report(error);
      }
    }
  };
  const takeImport = async (given) => {
    for (const file of given) {
      try {
        const read = JSON.parse((await readText(file)).text);
        const found = (read.conversations ?? (Array.isArray(read) ? [{ messages: read }] : [read])).map((each) => Conversation.read(each));
        if (!found.length || found.includes(null)) throw new Error("no conversations");
        for (const each of found) {
          // One that is here stays as it is.
          if (all.some((other) => other.id === each.id)) each.id = new Conversation().id;
          await keep(each, true);
        }
        announce(`${found.length} imported.`);
      } catch (error) {
        report(new Error(error.message.includes(file.name) ? error.message : `${file.name} cannot be imported: give a JSON file that this page exported, or one of OpenAI's messages.`));
      }
    }
  };
  const typed = (event) => {
    if (event.isComposing) return;
    if (event.key === "ArrowUp" && !draft.text && isKept && !busy) {
      event.preventDefault();
      const last = current.branch().findLast((index) => current.turns[index].asked);
      if (last !== undefined) setEditing({ index: last, isAnswer: false });
    }
    onEnter(event, sendDraft);
  };

  const branch = current.branch();
  const last = current.turns[current.leaf];
  const used = current.turns[current.end]?.answer.contextUsed ?? 0;
  const setSystem = (event) => {
    current.system = event.target.value;
    change({ system: current.system });
    if (!fresh.turns.length) fresh.system = current.system;
    if (isKept) keep(current);
    setVersion((version) => version + 1);
  };
  const turnOf = (index, place) => {
    const turn = current.turns[index];
    const siblings = current.siblings(index);
    const at = siblings.indexOf(index);
    const isEditing = (isAnswer) => editing?.index === index && editing.isAnswer === isAnswer;
    const buttons = html`
      ${turn.answer.content && html`<${CopyButton} text=${turn.answer.content} announce=${announce} />`}
      ${!busy && html`
        ${turn.answer.content && html`<button type="button" class="small" onClick=${() => setEditing({ index, isAnswer: true })}>Edit</button>`}
        <button type="button" class="small" title="Answer again, with another seed"
          onClick=${() => send(turn, { isAnew: true })}>Regenerate</button>
        ${turn.answer.isCut && index === current.leaf && html`<button type="button" class="small" onClick=${() => goOn(index)}>Continue</button>`}`}`;
    return html`<article class="turn" key=${index} aria-label=${`Message ${place + 1}`}>
      ${isEditing(false)
        ? html`<${Editor} label="Message" text=${turn.asked} action="Send again" verb="sends" cancel=${() => setEditing(null)}
            done=${(asked) => send({ ...turn, asked }, {})} />`
        : html`<${Asked} ...${turn} />
          <div class="actions tools mine">
            ${siblings.length > 1 && html`<span class="branches" role="group" aria-label="Versions">
              <button type="button" class="small" aria-label="Previous version" disabled=${at === 0} onClick=${() => show(siblings[at - 1])}>‹</button>
              <span class="num quiet">${at + 1}/${siblings.length}</span>
              <button type="button" class="small" aria-label="Next version" disabled=${at === siblings.length - 1} onClick=${() => show(siblings[at + 1])}>›</button>
            </span>`}
            ${turn.asked && html`<${CopyButton} text=${turn.asked} announce=${announce} />
              ${!busy && html`<button type="button" class="small" onClick=${() => setEditing({ index, isAnswer: false })}>Edit</button>`}`}
          </div>`}
      ${isEditing(true)
        ? html`<${Editor} label="Answer" text=${turn.answer.content} action="Save" verb="saves" cancel=${() => setEditing(null)} done=${(text) => editAnswer(index, text)} />`
        : html`<${Written} answer=${turn.answer} settings=${settings} view="chat" change=${change} isLooking=${looking === index}
            look=${(on) => setLooking(on ? index : -1)} announce=${announce} buttons=${buttons} />`}
      ${!busy && index === current.leaf && turn.answer.calls.length > 0 && html`<${Results} calls=${turn.answer.calls} send=${(results) => send({ results }, {})} />`}
    </article>`;
  };

  return html`<div class="view chat">
    <${ConversationList} all=${all ?? []} current=${current} take=${takeImport} begin=${() => { hideList(); focusBox(); }} />
    <div class="main">
      <div class="openers">
        <button type="button" popovertarget="conversations">Conversations</button>
        <button type="button" popovertarget="chat-settings">Settings</button>
      </div>
      <${Head} key=${current.id} conversation=${current} keep=${keep} isKept=${isKept}
        erase=${() => { if (writing === current.id) cancel(); drop(current); location.hash = "chat"; box.current?.focus(); }} />
      <div class="log" role="region" aria-label="Conversation">
        ${!isKept && html`<div class="empty quiet"><p>Ask something, attach text files, or <a href="#race">watch the race</a>.</p>
          <p>Conversations stay in this browser.</p></div>`}
        ${branch.map(turnOf)}
        <div class="log-end" ref=${end}></div>
      </div>
      <div class="composer"><form class="card ask" onSubmit=${(event) => { event.preventDefault(); sendDraft(); }}
        onDragOver=${(event) => event.preventDefault()} onDrop=${(event) => { event.preventDefault(); attach([...event.dataTransfer.files]); }}>
        <label for="chat-message">Message <span class="quiet">(Enter sends, Shift+Enter starts a new line)</span></label>
        ${draft.files.length > 0 && html`<ul class="chips" aria-label="Attached files">${draft.files.map(({ name }, index) => html`<li key=${index} class="chip">${name}
          <button type="button" class="small" aria-label=${`Remove ${name}`}
            onClick=${() => setDraft({ files: draft.files.filter((_, each) => each !== index) })}>×</button></li>`)}</ul>`}
        <textarea id="chat-message" rows="1" ref=${box} value=${draft.text} onKeyDown=${typed}
          onPaste=${(event) => { if (event.clipboardData.files.length) { event.preventDefault(); attach([...event.clipboardData.files]); } }}
          onInput=${(event) => setDraft({ text: event.target.value })}></textarea>
        <div class="actions">
          <${FileButton} label="Attach" multiple take=${attach} />
          ${isHere
            ? html`<button key="stop" type="button" class="primary" aria-keyshortcuts="Escape" title="Escape" onClick=${cancel}>Stop</button>`
            : html`<button key="send" class="primary" disabled=${busy || !(draft.text.trim() || draft.files.length)}>Send</button>`}
        </div>
        ${busy && !isHere && writing && html`<p class="wide quiet">An answer is being written in <a href=${`#chat/${writing}`}>another conversation</a>.</p>`}
        <${Context} used=${used} whole=${server.props.default_generation_settings.n_ctx} />
      </form></div>
    </div>
    <div class="side" id="chat-settings" popover="auto">
      <${Closer} target="chat-settings" />
      <section class="card" aria-label="Settings">
        <div class="field"><label for="chat-system">System prompt <span class="quiet">(of this chat and new ones)</span></label>
          <${Box} as="textarea" key=${current.id} id="chat-system" rows="3" value=${current.system} placeholder="How the model should answer" commit=${setSystem} /></div>
        <${Settings} name="chat" settings=${settings} change=${change} defaults=${server.props.default_generation_settings.params} />
      </section>
      <${Figures} answer=${last?.answer} />
    </div>
  </div>`;
}
