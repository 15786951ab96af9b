// Text in tokens by their source, the drafts that were refused, and one round as a tree.

import { Component, html, useEffect, useRef } from "./vendor/htm-preact-standalone.module.js";
import { countSources, refusedPath } from "./answer.js";

const KNOWN = ["target", "draft", "suffix", "lookup", "grammar"];

/** The class of a source, which gives it a colour and a pattern; what has no name here shares the last one. */
export function sourceClass(source) {
  return `src src-${KNOWN.includes(source) ? source : "other"}`;
}

const NAMES = { target: "target model", draft: "draft model", suffix: "suffix", lookup: "lookup", grammar: "grammar" };

export function sourceName(source) {
  return NAMES[source] ?? source;
}

export function Legend({ rounds }) {
  const counts = [...countSources(rounds)];
  const total = Math.max(1, counts.reduce((sum, [, count]) => sum + count, 0));
  return html`<ul class="legend" aria-label="Where the tokens come from">
    ${counts.map(([source, count]) => html`<li key=${source}>
      <span class=${sourceClass(source)} aria-hidden="true">ab</span>
      <span>${sourceName(source)}</span>
      <span class="num">${Math.round((100 * count) / total)} %</span>
    </li>`)}
  </ul>`;
}

// Of what was refused so much is shown: behind its first token nothing was ever judged.
const GHOST_LENGTH = 14;

function ghostOf(drafts) {
  const text = drafts.map((draft) => draft.text).join("").replaceAll("\n", "↵");
  const signs = [...text];
  return signs.length > GHOST_LENGTH ? `${signs.slice(0, GHOST_LENGTH).join("")}…` : text;
}

class Round extends Component {
  // Only the last round of an answer changes. The others are drawn once, however long the answer gets.
  shouldComponentUpdate(next) {
    const { round, ghosts, selected, kind } = this.props;
    return round !== next.round || kind !== next.kind || this.drawn !== next.round.pieces.length || ghosts !== next.ghosts
      || selected !== next.selected;
  }

  render({ round, index, ghosts, selected, kind }) {
    this.drawn = round.pieces.length;
    const pieces = kind ? round.pieces.filter((piece) => piece.kind === kind) : round.pieces;
    if (kind && !pieces.length) return null;
    const refused = ghosts ? refusedPath(round.drafts) : [];
    const said = pieces.map((piece) => html`<span
      class=${`${sourceClass(piece.source)}${piece.kind === "reasoning" ? " reasoning" : ""}`}>${piece.text}</span>`);
    // Refused drafts stand where they would have gone on: before the target's own token, the round's last.
    if (refused.length) {
      const ghost = html`<span class="ghost" aria-hidden="true">${ghostOf(refused)}</span>`;
      said.splice(Math.max(0, said.length - 1), 0, ghost);
    }
    return html`<span class=${selected ? "round selected" : "round"} data-round=${index}>${said}</span>`;
  }
}

/**
 * The rounds of an answer as text; a click chooses one of them.
 *
 * `kind`: of the pieces that are shown; all where it is left out. `label`: names a text that scrolls in itself, so that the
 * keyboard reaches it. `caret`: whether more is to come, whose end such a text shows. `beginning`: text before it, of unknown
 * tokens.
 */
export function TokenText({ rounds, ghosts, selected = -1, onSelect, caret, label, beginning, kind }) {
  const element = useRef(null);
  useEffect(() => {
    if (label && caret && element.current) element.current.scrollTop = element.current.scrollHeight;
  });
  const choose = (event) => {
    const round = event.target.closest?.("[data-round]");
    // A selection of text is no click.
    if (round && onSelect && !String(getSelection())) onSelect(Number(round.dataset.round));
  };
  const region = label ? { role: "group", tabIndex: 0, "aria-label": label } : {};
  return html`<div class=${onSelect ? "tokens choosable" : "tokens"} onClick=${choose} ref=${element} ...${region}>
    ${beginning}${rounds.map((round, index) => html`<${Round} key=${index} round=${round} index=${index} ghosts=${ghosts}
      kind=${kind} selected=${index === selected} />`)}${caret && html`<span class="caret" aria-hidden="true"></span>`}
  </div>`;
}

/** Spaces and ends of lines as signs, for a token that stands alone. */
export function shown(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→") || "∅";
}

const WIDTH = 92;
const HEIGHT = 30;
const GAP_X = 22;
const GAP_Y = 10;
const LONGEST = 10;

function short(text) {
  const signs = [...shown(text)];
  return signs.length > LONGEST ? `${signs.slice(0, LONGEST - 1).join("")}…` : signs.join("");
}

/** Give each draft a column by its depth and a row: the first below a node goes on in its row, others in new ones. */
function placed(drafts) {
  const places = [];
  let rows = 0;
  const place = (parent, depth, row) => {
    let next = row;
    drafts.forEach((draft, node) => {
      if (draft.parent !== parent) return;
      if (next === null) next = ++rows;
      places[node] = { depth, row: next };
      place(node, depth + 1, next);
      next = null;
    });
  };
  place(-1, 1, 0);
  return { places, rows: rows + 1, columns: Math.max(0, ...places.map((each) => each.depth)) };
}

function Tree({ drafts }) {
  const { places, rows, columns } = placed(drafts);
  const x = (depth) => (depth - 1) * (WIDTH + GAP_X) + GAP_X;
  const y = (row) => row * (HEIGHT + GAP_Y) + 2;
  const width = x(columns) + WIDTH + 4;
  const height = rows * (HEIGHT + GAP_Y);
  return html`<div class="tree" tabindex="0" role="group" aria-label="Tree of this round's drafts">
    <svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} aria-hidden="true">
      ${drafts.map((draft, node) => {
        const from = places[draft.parent] ?? { depth: 0, row: 0 };
        const startX = from.depth ? x(from.depth) + WIDTH : 0;
        const [startY, endX, endY] = [y(from.row) + HEIGHT / 2, x(places[node].depth), y(places[node].row) + HEIGHT / 2];
        const middle = (startX + endX) / 2;
        return html`<path class=${draft.accepted ? "edge accepted" : "edge"}
          d=${`M${startX} ${startY}C${middle} ${startY} ${middle} ${endY} ${endX} ${endY}`} />`;
      })}
      ${drafts.map((draft, node) => html`<g class=${`node ${sourceClass(draft.source)}${draft.accepted ? " accepted" : ""}`}
        transform=${`translate(${x(places[node].depth)} ${y(places[node].row)})`}>
        <title>${`${shown(draft.text)}, ${sourceName(draft.source)}, ${draft.accepted ? "accepted" : "refused"}`}</title>
        <rect width=${WIDTH} height=${HEIGHT} rx="7" />
        <text x=${WIDTH / 2} y=${HEIGHT / 2 + 4.5} text-anchor="middle">${short(draft.text)}</text>
      </g>`)}
    </svg>
    <ol class="hidden">
      ${drafts.map((draft, node) => html`<li>Depth ${places[node].depth}: ${shown(draft.text)}, from
        ${" "}${sourceName(draft.source)}, ${draft.accepted ? "accepted" : "refused"}</li>`)}
    </ol>
  </div>`;
}

/** One round of an answer looked at closely, with what chooses it: a slider, for the keyboard and for fingers. */
export function RoundInspector({ rounds, selected, onSelect }) {
  if (!rounds.length) return null;
  const index = Math.min(Math.max(selected, 0), rounds.length - 1);
  const round = rounds[index];
  const accepted = round.drafts.filter((draft) => draft.accepted).length;
  const own = round.sources.length - accepted;
  const summary = round.drafts.length
    ? `${round.drafts.length} drafted, ${accepted} accepted, ${own} from the target`
    : `no drafts, ${own} from the target`;
  return html`<section class="inspector" aria-label="One round in detail">
    <label class="slider">
      <span>Round <span class="num">${index + 1}</span> of <span class="num">${rounds.length}</span></span>
      <input type="range" min="1" max=${rounds.length} value=${index + 1}
        aria-valuetext=${`Round ${index + 1}: ${summary}`} onInput=${(event) => onSelect(Number(event.target.value) - 1)} />
    </label>
    <p class="quiet">${summary}</p>
    ${round.drafts.length > 0 && html`<${Tree} drafts=${round.drafts} />`}
    <p class="said"><span class="quiet">result: </span>${round.pieces.map((piece) => html`<span
      class=${sourceClass(piece.source)}>${shown(piece.text)}</span> `)}</p>
  </section>`;
}
