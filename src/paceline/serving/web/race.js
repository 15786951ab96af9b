// The race: one prompt and one seed, decoded plainly and then with speculation, and shown side by side afterwards. Run at
// the same time they would share the passes of the model, and each would slow the other down.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.module.js";
import { Answer, firstDifference } from "./answer.js";
import { gainText, speedText, timeText } from "./figures.js";
import { Legend, RoundInspector, TokenText } from "./tokens.js";
import { Settings, drawSeed, requestOf } from "./settings.js";
import { useFocusKept, useRedraw, useTask, wantsStillness } from "./writing.js";

const TEXTS = [
  ["A server's log", "2026-03-02 08:14:07 INFO web: started, listening on 127.0.0.1:8080\n2026-03-02 08:14:09 INFO web: GET /health 200 in 2 ms\n2026-03-02 08:14:11 INFO web: GET /items 200 in 14 ms\n2026-03-02 08:14:12 WARNING db: query took 812 ms\n2026-03-02 08:14:12 INFO web: GET /items 200 in 827 ms\n"],
  ["Code", "class Stack:\n    \"\"\"A stack of values.\"\"\"\n\n    def __init__(self):\n        self.values = []\n\n    def push(self, value):\n        self.values.append(value)\n\n    def pop(self):\n"],
  ["A story", "The ferry had left without them, and for a while nobody on the pier said a word. Then"],
];
const QUESTIONS = [
  ["Change some code", "Add type hints and docstrings to this class, and change nothing else:\n\nclass Stack:\n    def __init__(self):\n        self.values = []\n\n    def push(self, value):\n        self.values.append(value)\n\n    def pop(self):\n        return self.values.pop()\n\n    def peek(self):\n        return self.values[-1]\n"],
  ["A table", "Write a table of the twelve months with their number of days and their season in the northern hemisphere."],
  ["A story", "Tell a short story about a ferry that left too early."],
];

// A replay that is over in less is too fast to be watched; it is slowed down, and says so.
const SHORTEST_MS = 4000;
const SLOWDOWNS = [1, 2, 5, 10, 20, 50, 100];

// Of fewer tokens nothing can be seen.
const SHORTEST_RACE = 16;

// Single runs differ by so much on a quiet machine.
const LEVEL = 1.1;

function askedOf(prompt, isChat, settings, lane) {
  // A text that is gone on with has no end of its own: where the model ends it depends on the seed.
  const what = isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt, ignore_eos: true };
  return {
    ...what,
    ...requestOf({ ...settings, speculate: lane === "fast" }, "race"),
    // Neither lane may use what the other one read or wrote.
    cache_salt: `race-${lane}-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`,
  };
}

/** What the race came to: { tone, headline, details }. */
export function verdictOf(slow, fast) {
  const at = firstDifference(slow.text, fast.text);
  const ratio = fast.speed && slow.speed ? fast.speed / slow.speed : null;
  const told = fast.speculative;
  if (at < 0 && slow.numTokens < SHORTEST_RACE) {
    const tokens = slow.numTokens === 1 ? "one token" : `${slow.numTokens} tokens`;
    return { tone: "even", headline: "same text, but too short for a race", details: `The answer has ${tokens}. Race again, or give another prompt.` };
  }
  const measured = ratio === null ? "" : `Plain: ${speedText(slow.speed)} tokens/s. With speculation: ${speedText(fast.speed)} tokens/s.`;
  if (at >= 0) {
    const why = told?.verify === "rejection"
      ? "This server judges drafts by rejection sampling, which keeps the distribution of the text and not the text of a seed."
      : "A pass over several tokens rounds in another way than a pass over one, so a near-tie can fall the other way.";
    return { tone: "odd", headline: `the texts differ from character ${at + 1} on`, details: `${why} ${measured}` };
  }
  if (!told?.drafted) {
    const reason = told?.off_reason_text ? ` Why: ${told.off_reason_text}.` : "";
    return { tone: "even", headline: "same text; drafts would not have paid off, so there were none", details: `${measured}${reason}` };
  }
  if (ratio === null) return { tone: "even", headline: "same text; too short to compare the speeds", details: "" };
  // One run of each says little of a small difference, where the server's own estimate has room for none.
  const isLevel = told.gain != null && told.gain_low <= 1 && told.gain_high >= 1 && ratio < LEVEL && ratio > 1 / LEVEL;
  const estimate = told.gain == null ? "" : ` The server's own estimate: ${gainText(told.gain)} (${gainText(told.gain_low)} to ${gainText(told.gain_high)}).`;
  const lost = ratio < 1 && !isLevel ? " Drafting took more time than it saved." : "";
  return {
    tone: ratio >= 1 && !isLevel ? "won" : "even",
    headline: isLevel ? `same text, about as fast (${gainText(ratio)})` : `same text, ${gainText(ratio)}`,
    details: `${measured}${lost}${estimate}`,
  };
}

/** The round with most to look at: drafts that were accepted, and some that were not. */
function richest(rounds) {
  let [best, most] = [0, 0];
  rounds.forEach(({ drafts }, index) => {
    const accepted = drafts.filter((draft) => draft.accepted).length;
    const worth = drafts.length + accepted * (drafts.length - accepted);
    if (worth > most) [best, most] = [index, worth];
  });
  return best;
}

function Lane({ answer, name, title, rounds, shown, selected, onSelect, isLive }) {
  const total = Math.max(1, answer?.rounds.length ?? 1);
  const tokens = rounds.reduce((sum, round) => sum + round.sources.length, 0);
  const time = rounds.at(-1)?.ms ?? 0;
  const isDone = Boolean(answer?.isOver) && shown >= total;
  const state = !answer ? "" : answer.state === "failed" ? "failed" : isLive
    ? (answer.state === "asked" ? "reading the prompt" : "recording") : !isDone ? "" : answer.finish === "length" ? "cut off at its limit" : "finished";
  return html`<section class=${`lane ${name}`} aria-label=${title}>
    <header>
      <h3>${title}</h3>
      <span class="quiet">${state}</span>
      <span class="clock num">${timeText(time)}</span>
    </header>
    <div class="track" aria-hidden="true"><span class=${`fill ${name}`} style=${{ width: `${(100 * shown) / total}%` }}></span></div>
    <p class="quiet lane-figures"><span class="num">${tokens}</span> ${tokens === 1 ? "token" : "tokens"}
      ${answer?.speed ? html`, <span class="num">${speedText(answer.speed)}</span> tokens/s` : ""}</p>
    <${TokenText} rounds=${rounds} selected=${selected} onSelect=${onSelect}
      caret=${Boolean(answer) && !isDone && answer.state !== "failed" && answer.state !== "cancelled"} label=${`${title}: text`} />
  </section>`;
}

export function Race({ server, settings, change, announce, report, isShown }) {
  const hasChat = Boolean(server.props.chat_template);
  const examples = hasChat ? QUESTIONS : TEXTS;
  const [prompt, setPrompt] = useState(examples[0][1]);
  const [answers, setAnswers] = useState({ slow: null, fast: null });
  const [recording, setRecording] = useState(null);
  const [clock, setClock] = useState(null);
  const [slowdown, setSlowdown] = useState("auto");
  const [selected, setSelected] = useState(0);
  const [busy, run, cancel] = useTask(isShown);
  const box = useFocusKept(isShown);
  const redraw = useRedraw();
  const frame = useRef(0);
  const ended = useRef(null);
  const lanes = useRef(null);
  const result = useRef(null);
  useEffect(() => () => cancelAnimationFrame(frame.current), []);

  // Below a long prompt, or on a phone, the lanes would be out of sight.
  useEffect(() => {
    if (recording === "slow") lanes.current?.scrollIntoView({ block: "nearest" });
  }, [recording]);

  const { slow, fast } = answers;
  const isOver = slow?.state === "done" && fast?.state === "done";
  const last = Math.max(slow?.rounds.at(-1)?.ms ?? 0, fast?.rounds.at(-1)?.ms ?? 0);
  const paceOf = (ms) => (slowdown === "auto" ? SLOWDOWNS.find((times) => ms * times >= SHORTEST_MS) ?? SLOWDOWNS.at(-1) : Number(slowdown));
  const chosen = paceOf(last);
  const isPlaying = clock !== null && clock < last;

  // What is said at the end of a replay, and is said once.
  const end = () => {
    ended.current?.();
    ended.current = null;
  };

  const replay = (times, until, over) => {
    cancelAnimationFrame(frame.current);
    ended.current = over;
    const began = performance.now();
    const step = (now) => {
      const at = Math.min(until, (now - began) / times);
      setClock(at);
      if (at < until) frame.current = requestAnimationFrame(step);
      else end();
    };
    setClock(0);
    frame.current = requestAnimationFrame(step);
  };

  const skip = () => {
    cancelAnimationFrame(frame.current);
    setClock(last);
    end();
  };

  const start = () => run(async (signal) => {
    cancelAnimationFrame(frame.current);
    const used = settings.isLocked ? settings : { ...settings, seed: drawSeed() };
    if (!settings.isLocked) change({ seed: used.seed });
    const path = hasChat ? "v1/chat/completions" : "completion";
    const made = { slow: null, fast: null };
    report(null);
    setClock(null);
    setSelected(0);
    for (const lane of ["slow", "fast"]) {
      made[lane] = new Answer();
      setAnswers({ ...made });
      setRecording(lane);
      announce(lane === "slow" ? "Recording plain decoding." : "Recording with speculation.");
      await made[lane].follow(path, askedOf(prompt, hasChat, used, lane), redraw, signal);
      if (made[lane].state !== "done") {
        setRecording(null);
        if (made[lane].error) report(made[lane].error);
        announce(made[lane].state === "cancelled" ? "The race was stopped." : "");
        return;
      }
    }
    setRecording(null);
    setSelected(richest(made.fast.rounds));
    const verdict = verdictOf(made.slow, made.fast);
    const until = Math.max(made.slow.rounds.at(-1)?.ms ?? 0, made.fast.rounds.at(-1)?.ms ?? 0);
    const over = () => announce(`The race is over: ${verdict.headline}.`);
    if (wantsStillness()) {
      setClock(until);
      over();
      return;
    }
    announce("Both are recorded; replaying.");
    replay(paceOf(until), until, over);
  });

  const shownOf = (answer) => {
    if (!answer) return 0;
    if (clock === null || !isOver) return answer.rounds.length;
    let count = 0;
    while (count < answer.rounds.length && answer.rounds[count].ms <= clock) count += 1;
    return count;
  };
  const lane = (name, title, answer) => {
    const shown = shownOf(answer);
    return html`<${Lane} name=${name} title=${title} answer=${answer} shown=${shown}
      rounds=${answer?.rounds.slice(0, shown) ?? []} isLive=${recording === name}
      selected=${name === "fast" && isOver && !isPlaying ? selected : -1}
      onSelect=${name === "fast" && isOver ? setSelected : undefined} />`;
  };
  const verdict = isOver && !isPlaying ? verdictOf(slow, fast) : null;
  useEffect(() => {
    if (verdict) result.current?.scrollIntoView({ block: "nearest" });
  }, [verdict?.headline]);

  return html`<div class="view race">
    <h2>The race</h2>
    <p class="lead">One prompt, one seed, decoded twice: plainly, then with speculation. Both runs are recorded one after
      the other, and replayed side by side from their first tokens on.</p>
    <form class="card ask" onSubmit=${(event) => { event.preventDefault(); start(); }}>
      <label for="race-prompt">${hasChat ? "Message" : "Text to continue"}</label>
      <textarea id="race-prompt" rows="5" ref=${box} value=${prompt} onInput=${(event) => setPrompt(event.target.value)}></textarea>
      <div class="chips" role="group" aria-label="Examples">
        ${examples.map(([name, text]) => html`<button type="button" class="chip" key=${name}
          aria-pressed=${prompt === text} onClick=${() => setPrompt(text)}>${name}</button>`)}
      </div>
      <${Settings} name="race" settings=${settings} change=${change} defaults=${server.props.default_generation_settings.params} />
      <div class="actions">
        <button class="primary" disabled=${busy || !prompt}>${slow ? "Race again" : "Start the race"}</button>
        ${busy && html`<button type="button" aria-keyshortcuts="Escape" title="Escape" onClick=${cancel}>Stop</button>`}
        ${isPlaying && html`<button type="button" onClick=${skip}>Skip to the end</button>`}
        ${isOver && !busy && html`<button type="button" onClick=${() => replay(chosen, last)}>Replay</button>
          <label class="inline">at
            <select value=${slowdown} onChange=${(event) => setSlowdown(event.target.value)}>
              <option value="auto">automatic speed</option>
              ${SLOWDOWNS.map((times) => html`<option value=${times} key=${times}>${times === 1 ? "real time" : `1/${times} of real time`}</option>`)}
            </select>
          </label>`}
      </div>
      ${server.drafters.length === 0 && html`<p class="note">This server has no drafters, so both lanes decode plainly.</p>`}
    </form>
    ${slow && html`<div class="lanes" ref=${lanes}>
      ${lane("slow", "Plain", slow)}
      ${lane("fast", "Speculative", fast)}
    </div>`}
    ${isPlaying && html`<p class="quiet pace">${chosen === 1 ? "Replayed in real time." : `Replayed ${chosen} times slower than it was.`}</p>`}
    ${verdict && html`<div class=${`verdict ${verdict.tone}`} ref=${result}>
      <p class="headline">${verdict.headline}</p>
      <p>${verdict.details}</p>
    </div>`}
    ${verdict && fast.rounds.length > 0 && html`<div class="card">
      <${Legend} rounds=${fast.rounds} />
      <${RoundInspector} rounds=${fast.rounds} selected=${selected} onSelect=${setSelected} />
    </div>`}
  </div>`;
}
