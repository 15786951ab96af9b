// The page: finds the server, asks for a key where one is needed, and shows one view at a time.

import { html, render, useEffect, useState } from "./vendor/htm-preact-standalone.module.js";
import { getJson, setKey } from "./api.js";
import { Chat, Completion } from "./conversation.js";
import { Race } from "./race.js";
import { ServerView } from "./server.js";
import { settingsOf } from "./settings.js";

const VIEWS = [["race", "The race", Race], ["chat", "Chat", Chat], ["text", "Text", Completion], ["server", "Server", ServerView]];
const AGAIN_MS = 1000;

function viewOfAddress() {
  const name = location.hash.slice(1);
  return VIEWS.some(([each]) => each === name) ? name : "race";
}

function focusContent() {
  document.getElementById("content").focus();
}

function KeyForm({ refused, enter }) {
  const [value, setValue] = useState("");
  return html`<form class="card key" onSubmit=${(event) => { event.preventDefault(); enter(value.trim()); }}>
    <h2>This server asks for an API key</h2>
    ${refused && html`<p class="error" role="alert">${refused}</p>`}
    <label for="key">API key</label>
    <input id="key" type="password" autocomplete="off" value=${value} onInput=${(event) => setValue(event.target.value)} />
    <p class="quiet">The key is kept in this tab until it is closed, and sent to this server alone.</p>
    <div class="actions"><button class="primary" disabled=${!value.trim()}>Continue</button></div>
  </form>`;
}

function App() {
  const [view, setView] = useState(viewOfAddress());
  // A view that was opened stays as it is, and what it writes goes on, while another one is looked at.
  const [opened, setOpened] = useState([view]);
  const [server, setServer] = useState(null);
  const [settings, setSettings] = useState(null);
  const [waiting, setWaiting] = useState("Looking for the server.");
  const [needsKey, setNeedsKey] = useState(false);
  const [refused, setRefused] = useState("");
  const [problem, setProblem] = useState(null);
  const [announced, announce] = useState("");

  const find = async (hasNewKey = false) => {
    try {
      const props = await getJson("props");
      setServer({ props, drafters: props.speculative.drafters });
      setSettings((before) => before ?? settingsOf(props));
      setNeedsKey(false);
      setProblem(null);
      if (hasNewKey) focusContent();
    } catch (error) {
      if (error.status === 401) {
        setNeedsKey(true);
        setRefused(hasNewKey ? "The server does not know this key." : "");
        return;
      }
      // The server answers before its model is there.
      setWaiting(error.status === 503 ? "The model is being loaded." : error.message);
      setTimeout(find, AGAIN_MS);
    }
  };
  const report = (error) => {
    if (error?.status === 401) setNeedsKey(true);
    setProblem(error?.status === 401 ? null : error);
  };

  // For whoever measures how soon the page can be used.
  useEffect(() => {
    if (server) performance.mark("paceline-ready");
  }, [server]);

  useEffect(() => {
    find();
    const moved = () => {
      const name = viewOfAddress();
      setView(name);
      setOpened((before) => (before.includes(name) ? before : [...before, name]));
      setProblem(null);
      scrollTo(0, 0);
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);

  const title = VIEWS.find(([name]) => name === view)[1];
  useEffect(() => {
    document.title = `${title} · paceline`;
  }, [title]);
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); focusContent(); }}>Skip to the content</a>
    <header class="top">
      <h1><img src="page/icon.svg" alt="" width="28" height="28" />paceline</h1>
      <p class="model">${server ? server.props.model_alias : ""}</p>
      <nav aria-label="Views">
        ${VIEWS.map(([name, each]) => html`<a key=${name} href=${`#${name}`} aria-current=${view === name ? "page" : undefined}>${each}</a>`)}
      </nav>
    </header>
    <main id="content" tabindex="-1">
      ${problem && html`<p class="problem" role="alert"><span>${problem.message}</span>
        <button type="button" class="small" aria-label="Dismiss this message" onClick=${() => { setProblem(null); focusContent(); }}>×</button></p>`}
      ${needsKey
        ? html`<${KeyForm} refused=${refused} enter=${(key) => { setKey(key); find(true); }} />`
        : server
          ? VIEWS.filter(([name]) => opened.includes(name)).map(([name, , View]) => html`<div key=${name} hidden=${name !== view}>
              <${View} server=${server} settings=${settings} announce=${announce} report=${report} isShown=${name === view}
                change=${(changes) => setSettings((before) => ({ ...before, ...changes }))} />
            </div>`)
          : html`<p class="waiting" role="status">${waiting}</p>`}
    </main>
    <p class="hidden" role="status" aria-live="polite">${announced}</p>`;
}

render(html`<${App} />`, document.getElementById("app"));
