// How answers are sampled: what all views have in common.

import { html } from "./vendor/htm-preact-standalone.module.js";

const MAX_SEED = 0xffffffff;

export function drawSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

// A race is as long as one likes to watch, and a text that is gone on with may have no end of its own.
const MAX = { race: 200, text: 1000 };

/** The server's own defaults, in a form that the fields below can change. `most` is -1 for all that the context holds. */
export function settingsOf(props) {
  const { params } = props.default_generation_settings;
  return {
    temperature: Math.min(2, Math.round(20 * (params.temperature ?? 0.8)) / 20),
    seed: drawSeed(),
    isLocked: false,
    most: { chat: params.n_predict, ...MAX },
    speculate: true,
    ghosts: true,
  };
}

/** The fields of a request of one of the views. */
export function requestOf(settings, view) {
  const asked = { temperature: settings.temperature, seed: settings.seed, max_tokens: settings.most[view] };
  return settings.speculate ? asked : { ...asked, speculative: { off: true } };
}

function whole(event, low, high, before) {
  const value = Number.parseInt(event.target.value, 10);
  return Number.isNaN(value) ? before : Math.min(high, Math.max(low, value));
}

/** `name`: of the view. What the race decides by itself is left out there, and it has an end. */
export function Settings({ settings, change, name }) {
  const id = (field) => `${name}-${field}`;
  const isRace = name === "race";
  const most = settings.most[name];
  const setMost = (event) => {
    const given = event.target.value.trim() || isRace ? whole(event, 1, 100000, most) : -1;
    change({ most: { ...settings.most, [name]: given } });
  };
  return html`<fieldset class="settings">
    <legend class="hidden">How the answer is sampled</legend>
    <div class="field">
      <label for=${id("temperature")}>Temperature <output class="num" for=${id("temperature")}>${settings.temperature.toFixed(2)}</output></label>
      <input id=${id("temperature")} type="range" min="0" max="2" step="0.05" value=${settings.temperature}
        onInput=${(event) => change({ temperature: Number(event.target.value) })} />
    </div>
    <div class="field">
      <label for=${id("most")}>Max tokens</label>
      <input id=${id("most")} class="num" type="number" min="1" max="100000" value=${most < 0 ? "" : most}
        placeholder="the context's rest" onChange=${setMost} />
    </div>
    <div class="field">
      <label for=${id("seed")}>Seed</label>
      <input id=${id("seed")} class="num" type="number" min="0" max=${MAX_SEED} value=${settings.seed}
        onChange=${(event) => change({ seed: whole(event, 0, MAX_SEED, settings.seed), isLocked: true })} />
    </div>
    <label class="check"><input type="checkbox" checked=${settings.isLocked}
      onChange=${(event) => change({ isLocked: event.target.checked })} /> keep this seed</label>
    ${!isRace && html`<label class="check"><input type="checkbox" checked=${settings.speculate}
      onChange=${(event) => change({ speculate: event.target.checked })} /> speculate</label>
    <label class="check"><input type="checkbox" checked=${settings.ghosts}
      onChange=${(event) => change({ ghosts: event.target.checked })} /> show refused drafts</label>`}
  </fieldset>`;
}
