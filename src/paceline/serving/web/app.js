// The page: finds the server, asks for a key where one is needed, and shows one view at a time.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.module.js";
import { getJson, setKey, setModel } from "./api.js";
import { keep, kept } from "./keeping.js";
import { settingsOf } from "./settings.js";

// A view is loaded when it is first shown: [name, title, what loads it].
const VIEWS = [
  ["chat", "Chat", async () => (await import("./chat.js")).Chat],
  ["race", "The race", async () => (await import("./race.js")).Race],
  ["text", "Text", async () => (await import("./text.js")).Text],
  ["server", "Server", async () => (await import("./server.js")).ServerView],
];
const AGAIN_MS = 1000;

/** The view that the address names, and what follows it: [name, place]. Without one it is chosen by the model. */
function readAddress() {
  const [name, place = ""] = location.hash.slice(1).split("/");
  return VIEWS.some(([each]) => each === name) ? [name, place] : ["", ""];
}

function focusContent() {
  document.getElementById("content").focus();
}

function KeyForm({ refused, enter }) {
  const [value, setValue] = useState("");
  return html`<form class="card key" onSubmit=${(event) => { event.preventDefault(); enter(value.trim()); }}>
    <h2>This server needs an API key</h2>
    ${refused && html`<p class="error" role="alert">${refused}</p>`}
    <label for="key">API key</label>
    <input id="key" type="password" autocomplete="off" value=${value} onInput=${(event) => setValue(event.target.value)} />
    <p class="quiet">The key is kept until this tab is closed, and sent to this server only.</p>
    <div class="actions"><button class="primary" disabled=${!value.trim()}>Continue</button></div>
  </form>`;
}

/** A view, once its module is there. */
function View({ load, ...given }) {
  const [Loaded, setLoaded] = useState(() => {
    load().then((view) => setLoaded(() => view));
    return null;
  });
  // For whoever measures how soon the page can be used.
  useEffect(() => {
    if (Loaded) performance.mark("paceline-ready");
  }, [Loaded]);
  return Loaded && html`<${Loaded} ...${given} />`;
}

function App() {
  const [[named, place], setAddress] = useState(readAddress());
  // A view that was opened stays as it is, and what it writes goes on, while another one is looked at.
  const opened = useRef([]);
  const [server, setServer] = useState(null);
  // Where there are several: { names, chosen }.
  const [models, setModels] = useState(null);
  const [settings, setSettings] = useState(null);
  const [loading, setLoading] = useState("");
  const [waiting, setWaiting] = useState("Connecting to the server.");
  const [needsKey, setNeedsKey] = useState(false);
  const [refused, setRefused] = useState("");
  const [problem, setProblem] = useState(null);
  const [announced, announce] = useState("");

  const take = (props) => {
    setServer({ props, drafters: props.speculative.drafters });
    setSettings((before) => before ?? settingsOf(props, kept("settings")));
  };
  /** Ask another model from now on, which is loaded where it is not. */
  const choose = async (chosen, before = "") => {
    const turn = (name) => {
      setModel(name);
      setModels((known) => ({ ...known, chosen: name }));
    };
    turn(chosen);
    setProblem(null);
    setLoading(`Loading ${chosen}.`);
    try {
      take(await getJson("props?autoload=true"));
      keep("model", chosen);
    } catch (error) {
      turn(before);
      report(error);
    }
    setLoading("");
  };
  const find = async (hasNewKey = false) => {
    try {
      const props = await getJson("props");
      if (props.role === "router") {
        const { data } = await getJson("v1/models");
        const names = data.map((model) => model.id);
        setModels({ names, chosen: "" });
        setWaiting("Choose a model above.");
        const last = kept("model");
        const loaded = data.find((model) => model.status.value === "loaded")?.id;
        const chosen = names.includes(last) ? last : loaded ?? (names.length === 1 ? names[0] : null);
        if (chosen) choose(chosen);
      } else take(props);
      setNeedsKey(false);
      setProblem(null);
      if (hasNewKey) focusContent();
    } catch (error) {
      if (error.status === 401) {
        setNeedsKey(true);
        setRefused(hasNewKey ? "The server does not know this key." : "");
        return;
      }
      // The server answers HTTP while its model is still loading.
      setWaiting(error.status === 503 ? "The model is being loaded." : error.message);
      setTimeout(find, AGAIN_MS);
    }
  };
  const report = (error) => {
    if (error?.status === 401) setNeedsKey(true);
    setProblem(error?.status === 401 ? null : error);
  };
  const change = (changes) => setSettings((before) => {
    const after = { ...before, ...changes };
    keep("settings", after);
    return after;
  });

  useEffect(() => {
    find();
    const moved = () => setAddress(readAddress());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);

  const places = useRef({});
  if (named) places.current[named] = place;
  const view = named || (!server ? "" : server.props.chat_template ? "chat" : "race");
  if (view && !opened.current.includes(view)) opened.current.push(view);
  useEffect(() => {
    if (!view) return;
    document.title = `${VIEWS.find(([name]) => name === view)[1]} · paceline`;
    setProblem(null);
    scrollTo(0, 0);
  }, [view]);
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); focusContent(); }}>Skip to the content</a>
    <header class="top">
      <h1><img src="page/icon.svg" alt="" width="28" height="28" />paceline</h1>
      ${models?.names.length > 1
        ? html`<select class="model" aria-label="Model" value=${models.chosen} onChange=${(event) => choose(event.target.value, models.chosen)}>
            ${!models.chosen && html`<option value="">Choose a model</option>`}
            ${models.names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
          </select>`
        : html`<p class="model">${server ? server.props.model_alias : ""}</p>`}
      <nav aria-label="Views">
        ${VIEWS.map(([name, each]) => html`<a key=${name} href=${`#${[name, places.current[name]].filter(Boolean).join("/")}`} aria-current=${view === name ? "page" : undefined}>${each}</a>`)}
      </nav>
    </header>
    <main id="content" tabindex="-1">
      ${problem && html`<p class="problem" role="alert"><span>${problem.message}</span>
        <button type="button" class="small" aria-label="Dismiss this message" onClick=${() => { setProblem(null); focusContent(); }}>×</button></p>`}
      ${needsKey
        ? html`<${KeyForm} refused=${refused} enter=${(key) => { setKey(key); find(true); }} />`
        : html`${(loading || !server) && html`<p class="waiting" role="status">${loading || waiting}</p>`}
          ${server && VIEWS.filter(([name]) => opened.current.includes(name)).map(([name, , load]) => html`<div key=${name}
            hidden=${loading || name !== view}>
            <${View} load=${load} server=${server} settings=${settings} announce=${announce} report=${report} isShown=${!loading && name === view}
              place=${places.current[name] ?? ""} change=${change} />
          </div>`)}`}
    </main>
    <p class="hidden" role="status" aria-live="polite">${announced}</p>`;
}

// What is most likely to be shown is made ready while the server is asked.
VIEWS.find(([name]) => name === (readAddress()[0] || "chat"))[2]();
render(html`<${App} />`, document.getElementById("app"));
