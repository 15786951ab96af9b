// What an answer comes to, in figures: its speed beside plain decoding's, what was accepted, and where the time went.

import { html } from "./vendor/htm-preact-standalone.module.js";
import { countDepths, countDrafts } from "./answer.js";
import { Legend, sourceClass, sourceName } from "./tokens.js";

export function speedText(speed) {
  return speed == null ? "–" : speed >= 100 ? String(Math.round(speed)) : speed.toFixed(1);
}

export function gainText(gain) {
  return `${gain.toFixed(gain >= 10 ? 0 : gain >= 1.95 ? 1 : 2)}×`;
}

export function timeText(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(ms >= 10000 ? 0 : 1)} s` : `${ms.toFixed(ms >= 10 ? 0 : 1)} ms`;
}

const share = (part, whole) => (whole > 0 ? part / whole : 0);
const percent = (value) => `${Math.round(100 * value)} %`;

function Speed({ answer }) {
  const plain = answer.plainSpeed;
  const most = Math.max(answer.speed ?? 0, plain?.high ?? 0) || 1;
  const width = (value) => ({ width: `${(100 * value) / most}%` });
  return html`<div class="speed">
    <p class="big"><span class="num">${speedText(answer.speed)}</span> <span class="unit">tokens/s</span></p>
    <div class="bars" aria-hidden="true">
      <div class="track"><span class="fill fast" style=${width(answer.speed ?? 0)}></span></div>
      ${plain && html`<div class="track">
        <span class="fill slow" style=${width(plain.expected)}></span>
        <span class="bounds" style=${{ left: `${(100 * plain.low) / most}%`, ...width(plain.high - plain.low) }}></span>
      </div>`}
    </div>
    <p>${plain
      ? html`plain decoding: about <span class="num">${speedText(plain.expected)}</span>
          <span class="quiet num"> (${speedText(plain.low)} to ${speedText(plain.high)})</span>`
      : html`<span class="quiet">plain decoding: ${answer.isOver ? "not measured in this answer" : "not measured yet"}</span>`}</p>
    ${answer.gain && html`<p>gain: <strong class="num">${gainText(answer.gain.expected)}</strong>
      <span class="quiet num"> (${gainText(answer.gain.low)} to ${gainText(answer.gain.high)})</span></p>`}
  </div>`;
}

function Depths({ answer }) {
  const told = answer.speculative?.acceptance_by_depth;
  const depths = countDepths(answer.rounds).map((each) => share(each.accepted, each.judged));
  const shares = told?.length ? told : depths;
  if (!shares.length) return null;
  return html`<table class="depths">
    <caption>Accepted, by depth of the draft</caption>
    <thead class="hidden"><tr><th scope="col">Depth</th><th scope="col">Share accepted</th></tr></thead>
    <tbody>${shares.map((value, depth) => html`<tr key=${depth}>
      <th scope="row" class="num">${depth + 1}</th>
      <td><span class="track" aria-hidden="true"><span class="fill fast" style=${{ width: `${100 * value}%` }}></span></span>
        <span class="num">${percent(value)}</span></td>
    </tr>`)}</tbody>
  </table>`;
}

function Drafters({ answer }) {
  const told = answer.speculative?.drafters;
  const counts = told ?? countDrafts(answer.rounds);
  const rows = Object.entries(counts).filter(([, count]) => count.drafted || count.draft_ms);
  if (!rows.length) return null;
  return html`<table>
    <caption>Accepted, by drafter</caption>
    <thead><tr><th scope="col">Drafter</th><th scope="col">Drafted</th><th scope="col">Accepted</th><th scope="col">Share</th></tr></thead>
    <tbody>${rows.map(([name, count]) => html`<tr key=${name}>
      <th scope="row"><span class=${sourceClass(name)}>${sourceName(name)}</span></th>
      <td class="num">${count.drafted}</td><td class="num">${count.accepted}</td>
      <td class="num">${count.drafted ? percent(share(count.accepted, count.drafted)) : "–"}</td>
    </tr>`)}</tbody>
  </table>`;
}

const PHASES = [["verify_ms", "passes of the target model"], ["draft_ms", "drafting and planning"], ["sampling_ms", "sampling"], ["rest_ms", "everything else"]];

// As `off_reason_text` has it.
const OFF = {
  asked: "plain decoding was asked for", no_drafters: "there is no drafter for this request",
  prompts: "prompts were processed in the same passes", measuring: "plain rounds were measured",
  no_gain: "no draft would have paid", losing: "earlier drafts had used up what speculation may lose",
  short: "the answer was too short", no_match: "the drafters had no proposal",
  draft_min: "the drafts were shorter than draft-min", no_room: "the engine had no room for drafts",
};

function Ledger({ answer }) {
  const told = answer.speculative;
  if (!told || !told.rounds) return null;
  const spent = PHASES.reduce((sum, [name]) => sum + told[name], 0);
  const plain = told.gain == null ? null : told.gain * spent;
  const off = Object.entries(told.off_rounds);
  return html`<table class="ledger">
    <caption>Where the time went</caption>
    <tbody>
      <tr><th scope="row">Rounds</th><td class="num">${told.rounds}</td></tr>
      <tr><th scope="row">Tokens a round</th><td class="num">${(told.tau ?? 0).toFixed(2)}</td></tr>
      ${PHASES.map(([name, label]) => html`<tr key=${name}><th scope="row">Time in ${label}</th>
        <td class="num">${timeText(told[name])}</td></tr>`)}
      <tr class="sum"><th scope="row">Total time</th><td class="num">${timeText(spent)}</td></tr>
      ${plain !== null && html`
        <tr><th scope="row">Plain decoding, estimated</th><td class="num">${timeText(plain)}</td></tr>
        <tr class="sum"><th scope="row">${plain >= spent ? "Faster than plain by" : "Slower than plain by"}</th>
          <td class="num">${timeText(Math.abs(plain - spent))}</td></tr>`}
      ${off.map(([reason, count]) => html`<tr key=${reason}><th scope="row">Rounds without drafts: ${OFF[reason] ?? reason}</th>
        <td class="num">${count}</td></tr>`)}
    </tbody>
  </table>`;
}

export function Figures({ answer }) {
  if (!answer || answer.state === "kept") {
    return html`<aside class="figures empty" aria-label="Figures"><p class="quiet">Speed, and where the tokens came
      from, appear here.</p></aside>`;
  }
  return html`<aside class="figures" aria-label="Figures">
    <${Speed} answer=${answer} />
    <${Legend} rounds=${answer.rounds} />
    ${answer.isOver && answer.speculative?.off_reason_text
      && html`<p class="note">Nothing was drafted: ${answer.speculative.off_reason_text}.</p>`}
    <${Depths} answer=${answer} />
    <${Drafters} answer=${answer} />
    <${Ledger} answer=${answer} />
  </aside>`;
}
