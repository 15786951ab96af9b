// How answers are sampled, what they keep to, and how they are shown: what all views have in common.

import { html, useState } from "./vendor/htm-preact-standalone.module.js";

const MAX_SEED = 0xffffffff;

export function drawSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

// Fields of a request that are numbers: [name, label, step, title]. An empty one is left to the server, whose value it shows.
const TEMPERATURE = ["temperature", "Temperature", 0.05, "How freely tokens are chosen; 0 always takes the most likely one"];
const SAMPLERS = [
  ["top_k", "Top-k", 1, "Choose from the k most likely tokens; 0 keeps all"],
  ["top_p", "Top-p", 0.01, "Choose from the most likely tokens that add up to this probability; 1 keeps all"],
  ["min_p", "Min-p", 0.01, "Drop tokens less likely than this share of the most likely one; 0 keeps all"],
  ["typical_p", "Typical-p", 0.01, "Locally typical sampling; 1 turns it off"],
  ["top_n_sigma", "Top-n sigma", 0.1, "Drop tokens this many standard deviations below the best; -1 turns it off"],
  ["repeat_penalty", "Repetition penalty", 0.01, "Penalty for tokens that occurred recently; 1 turns it off"],
  ["repeat_last_n", "Penalty window", 1, "How many recent tokens the penalties consider; -1 for all"],
  ["presence_penalty", "Presence penalty", 0.1, "Flat penalty for tokens that occurred recently; 0 turns it off"],
  ["frequency_penalty", "Frequency penalty", 0.1, "Penalty for each recent occurrence of a token; 0 turns it off"],
  ["dry_multiplier", "DRY strength", 0.1, "Penalty for continuing a repetition; 0 turns DRY off"],
  ["dry_base", "DRY base", 0.05, "Growth of the penalty with every further repeated token"],
  ["dry_allowed_length", "DRY allowed length", 1, "Shorter repetitions are not penalised"],
  ["dry_penalty_last_n", "DRY window", 1, "How many recent tokens are searched for repetitions; -1 for all"],
  ["xtc_probability", "XTC probability", 0.05, "How often the most likely tokens are dropped; 0 turns XTC off"],
  ["xtc_threshold", "XTC threshold", 0.05, "Of the tokens at least this likely, all but the least likely are dropped"],
  ["dynatemp_range", "Dynamic temperature range", 0.05, "Change the temperature by up to this; 0 turns it off"],
  ["dynatemp_exponent", "Dynamic temperature exponent", 0.1, "Exponent of the entropy"],
  ["min_tokens", "Min tokens", 1, "The answer does not end before it has so many tokens"],
  ["reasoning_budget_tokens", "Reasoning limit", 1, "Maximum tokens of reasoning; -1 for any number"],
];

const escaped = (line) => line.replace(/\\([nt\\])/g, (_, sign) => ({ n: "\n", t: "\t", "\\": "\\" })[sign]);
const lines = (text) => text.split("\n").filter(Boolean).map(escaped);

function json(text, label, isRight) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not valid JSON: ${error.message}`);
  }
  if (!isRight(value)) throw new Error(`${label} has another form: see its example.`);
  return value;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

// Fields that are texts here: [name, label, hint, what is sent of it, the views that have it].
const TEXTS = [
  ["stop", "Stop texts", "one a line; \\n is a line break", (text) => ({ stop: lines(text) }), ["chat", "text"]],
  ["schema", "JSON schema", "{\"type\": \"object\"}", (text) => ({ json_schema: json(text, "JSON schema", isObject) }), ["chat", "text"]],
  ["tools", "Tools", "[{\"type\": \"function\", \"function\": {\"name\": …}}]", (text) => ({ tools: json(text, "Tools", Array.isArray) }), ["chat"]],
  ["breakers", "DRY sequence breakers", "one a line", (text) => ({ dry_sequence_breakers: lines(text) }), []],
  ["order", "Order of samplers", "", (text) => ({ samplers: text.split(/[;,\s]+/).filter(Boolean) }), []],
  ["bias", "Logit bias", "{\"15043\": -1}", (text) => ({ logit_bias: json(text, "Logit bias", isObject) }), []],
];

/** The settings of somebody who has changed none. `most` is -1 for the rest of the context, `seed` where none was used yet. */
export function defaultSettings(props) {
  return {
    sampling: {},
    texts: {},
    system: "",
    reasoning: "",
    seed: -1,
    isLocked: false,
    // A race is as long as one likes to watch.
    most: { chat: props.default_generation_settings.params?.n_predict ?? -1, text: -1, race: 200 },
    speculate: true,
    ghosts: true,
    tokens: { chat: false, text: true },
  };
}

const INNER = { sampling: "number", texts: "string", most: "number", tokens: "boolean" };

/** The default settings, with what was kept of others. */
export function settingsOf(props, kept) {
  const settings = defaultSettings(props);
  for (const [name, value] of Object.entries(isObject(kept) ? kept : {})) {
    if (!(name in settings) || typeof value !== typeof settings[name]) continue;
    const isRight = ([, each]) => typeof each === INNER[name];
    settings[name] = isObject(value) ? { ...settings[name], ...Object.fromEntries(Object.entries(value).filter(isRight)) } : value;
  }
  return settings;
}

/** The fields of a request of one of the views. An `Error` says in a line what cannot be sent. */
export function requestOf(settings, view) {
  const asked = { seed: settings.seed, max_tokens: settings.most[view] };
  if (view === "race") {
    if (settings.sampling.temperature !== undefined) asked.temperature = settings.sampling.temperature;
  } else {
    Object.assign(asked, settings.sampling);
    for (const [name, , , sent, views] of TEXTS) {
      if (settings.texts[name]?.trim() && (!views.length || views.includes(view))) Object.assign(asked, sent(settings.texts[name]));
    }
    if (view === "chat" && settings.reasoning) asked.enable_thinking = settings.reasoning === "on";
  }
  return settings.speculate ? asked : { ...asked, speculative: { off: true } };
}

function whole(event, low, high, before) {
  const value = Number.parseInt(event.target.value, 10);
  return Number.isNaN(value) ? before : Math.min(high, Math.max(low, value));
}

/** A box whose text counts once it is left: until then it is not touched, whatever else on the page changes. */
export function Box({ as = "input", value, commit, ...others }) {
  const [typed, setTyped] = useState(null);
  const change = (event) => {
    setTyped(null);
    commit(event);
  };
  return html`<${as} ...${others} value=${typed ?? value} onInput=${(event) => setTyped(event.target.value)} onChange=${change} />`;
}

/** `name`: of the view. What the race decides by itself is left out there, and it has an end. `defaults`: the server's. */
export function Settings({ settings, change, name, defaults }) {
  const id = (field) => `${name}-${field}`;
  const isRace = name === "race";
  const most = settings.most[name];
  const setMost = (event) => {
    const given = event.target.value.trim() || isRace ? whole(event, 1, 1000000, most) : -1;
    change({ most: { ...settings.most, [name]: given } });
  };
  const setSeed = (event) => {
    const seed = whole(event, 0, MAX_SEED, null);
    change(seed === null ? { isLocked: false } : { seed, isLocked: true });
  };
  const number = ([field, label, step, title]) => {
    const set = (event) => {
      const { [field]: before, ...others } = settings.sampling;
      const value = event.target.valueAsNumber;
      change({ sampling: Number.isNaN(value) ? others : { ...others, [field]: value } });
    };
    const usual = defaults?.[field];
    return html`<div class="field" key=${field} title=${title}>
      <label for=${id(field)}>${label}</label>
      <${Box} id=${id(field)} class="num" type="number" step=${step} value=${settings.sampling[field] ?? ""}
        placeholder=${usual == null ? "" : Number(usual.toFixed(4))} commit=${set} />
    </div>`;
  };
  const text = ([field, label, hint]) => html`<div class="field wide" key=${field}>
    <label for=${id(field)}>${label}</label>
    <${Box} as="textarea" id=${id(field)} rows="2" placeholder=${field === "order" ? defaults?.samplers?.join("; ") : hint}
      value=${settings.texts[field] ?? ""} commit=${(event) => change({ texts: { ...settings.texts, [field]: event.target.value } })} />
  </div>`;
  const check = (field, label) => html`<label class="check"><input type="checkbox" checked=${settings[field]}
    onChange=${(event) => change({ [field]: event.target.checked })} /> ${label}</label>`;
  const isSet = Object.keys(settings.sampling).length || Object.values(settings.texts).some(Boolean) || settings.reasoning;
  return html`<fieldset class="settings">
    <legend class="hidden">How the answer is generated</legend>
    ${number(TEMPERATURE)}
    <div class="field wide">
      <label for=${id("seed")}>Seed</label>
      <${Box} id=${id("seed")} class="num" type="number" min="0" max=${MAX_SEED} value=${settings.isLocked ? settings.seed : ""}
        placeholder="random" commit=${setSeed} />
    </div>
    ${settings.seed >= 0 && check("isLocked", settings.isLocked ? "keep this seed" : `keep the last one, ${settings.seed}`)}
    <div class="field wide">
      <label for=${id("most")}>Max tokens</label>
      <${Box} id=${id("most")} class="num" type="number" min="1" max="1000000" value=${most < 0 ? "" : most}
        placeholder="the rest of the context" commit=${setMost} />
    </div>
    ${!isRace && html`
      ${check("speculate", "use speculative decoding")}
      <label class="check"><input type="checkbox" checked=${settings.tokens[name]}
        onChange=${(event) => change({ tokens: { ...settings.tokens, [name]: event.target.checked } })} /> colour tokens by drafter</label>
      ${check("ghosts", "show rejected drafts between tokens")}
      <details class="more"><summary>Stop texts, JSON${name === "chat" ? ", tools, reasoning" : ""}</summary><div class="fields">
        ${TEXTS.filter(([, , , , views]) => views.includes(name)).map(text)}
        ${name === "chat" && html`<div class="field wide"><label for=${id("reasoning")}>Reasoning</label>
          <select id=${id("reasoning")} value=${settings.reasoning} onChange=${(event) => change({ reasoning: event.target.value })}>
            <option value="">the model's default</option><option value="on">on</option><option value="off">off</option>
          </select></div>`}
      </div></details>
      <details class="more"><summary>All samplers</summary><div class="fields">
        ${SAMPLERS.map(number)}
        ${TEXTS.filter(([, , , , views]) => !views.length).map(text)}
      </div></details>
      ${isSet ? html`<button type="button" class="small" onClick=${() => change({ sampling: {}, texts: {}, reasoning: "" })}>Reset to
        the server's defaults</button>` : ""}`}
  </fieldset>`;
}
