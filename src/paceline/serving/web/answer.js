// One answer while it is written: its rounds, and what they come to.

import { ApiError, stream } from "./api.js";

/**
 * States: "asked" until the first token, "writing", then "done", "cancelled" or "failed"; "kept" where nothing but its text
 * and a few figures are left of it. `beginning` is what was there before, which it continues: { content, reasoning }.
 *
 * A round is { pieces: [{ text, source, kind }], drafts, sources, ms }: what it added, what was drafted for it, the source
 * of each token, and the milliseconds of decoding until it was there, by the server's clock. Kinds are "reasoning",
 * "content" and "call". A call is { id, name, arguments }, as OpenAI's API has them.
 */
export class Answer {
  constructor({ content = "", reasoning = "" } = {}) {
    this.beginning = { content, reasoning };
    this.state = "asked";
    this.rounds = [];
    this.calls = [];
    this.progress = null;
    this.timings = null;
    this.speculative = null;
    this.gain = null;
    this.finish = null;
    this.error = null;
    this.numTokens = 0;
    this.most = -1;
    this.contextUsed = 0;
  }

  /** An answer of which the browser kept what `toJSON` returned, or less. */
  static kept({ content, reasoning, calls = [], finish, contextUsed = 0, note = "" }) {
    return Object.assign(new Answer({ content, reasoning }), { state: "kept", calls, finish, contextUsed, note });
  }

  toJSON() {
    const { content, reasoning, calls, finish, contextUsed } = this;
    return { content, reasoning, calls, finish, contextUsed, note: this.note ?? "" };
  }

  get isOver() {
    return this.state !== "asked" && this.state !== "writing";
  }

  textOf(kind) {
    const pieces = this.rounds.flatMap((round) => round.pieces);
    return (this.beginning[kind] ?? "") + pieces.filter((piece) => piece.kind === kind).map((piece) => piece.text).join("");
  }

  /** All that was written, in its order. */
  get text() {
    return this.rounds.flatMap((round) => round.pieces).map((piece) => piece.text).join("");
  }

  get content() {
    return this.textOf("content");
  }

  get reasoning() {
    return this.textOf("reasoning");
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  /** Whether it ended before its model ended it, and there is something to continue. */
  get isCut() {
    return this.isOver && this.finish !== "stop" && this.finish !== "tool_calls" && !this.calls.length && !this.isEmpty;
  }

  /** Tokens a second; null until there are some. */
  get speed() {
    return this.timings?.predicted_per_second || null;
  }

  /** What plain decoding would do, by the server's estimate: tokens a second, { low, expected, high }. */
  get plainSpeed() {
    const gain = this.gain;
    if (!this.speed || !gain?.expected) return null;
    return {
      low: this.speed / gain.high,
      expected: this.speed / gain.expected,
      high: this.speed / gain.low,
    };
  }

  /** Ask, and take what comes until the end. `changed` is called whenever something did. */
  async follow(path, body, changed, signal) {
    const asked = { ...body, return_rounds: true, timings_per_token: true, return_progress: true };
    this.most = body.max_tokens;
    try {
      for await (const chunk of stream(path, asked, signal)) {
        this.take(chunk);
        changed();
      }
      if (!this.isOver) throw new ApiError("The answer broke off before its end.");
    } catch (error) {
      this.state = error.name === "AbortError" ? "cancelled" : "failed";
      if (this.state === "failed") {
        this.error = error instanceof ApiError ? error : new ApiError(`The answer cannot be read: ${error.message}`);
      }
    }
    changed();
  }

  take(chunk) {
    if (chunk.prompt_progress) this.progress = chunk.prompt_progress;
    if (chunk.timings) {
      this.timings = chunk.timings;
      this.contextUsed = chunk.timings.cache_n + chunk.timings.prompt_n + chunk.timings.predicted_n;
    }
    if (chunk.speculative) {
      this.speculative = chunk.speculative;
      this.noteGain(chunk.speculative);
    }
    if (chunk.round) {
      this.state = "writing";
      this.noteGain(chunk.round);
      this.numTokens += chunk.round.sources.length;
      this.rounds.push({ pieces: [], drafts: chunk.round.drafts, sources: chunk.round.sources, ms: 0 });
    }
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? { content: chunk.content };
    for (const [name, kind] of [["reasoning_content", "reasoning"], ["content", "content"]]) {
      if (delta[name]) this.say(delta[name], kind, chunk.sources);
    }
    for (const { index, id, function: { name, arguments: text } } of delta.tool_calls ?? []) {
      this.calls[index] ??= { id, name, arguments: "" };
      this.calls[index].arguments += text ?? "";
      this.say(name ? `${name} ` : text, "call", chunk.sources);
    }
    if (chunk.timings && this.rounds.length) this.rounds.at(-1).ms = chunk.timings.predicted_ms;
    if (chunk.stop === true || choice?.finish_reason) {
      this.state = "done";
      this.finish = choice ? choice.finish_reason : chunk.stop_type === "limit" ? "length" : "stop";
    }
  }

  noteGain(told) {
    if (told.gain == null) return;
    this.gain = { expected: told.gain, low: told.gain_low, high: told.gain_high };
  }

  say(text, kind, sources) {
    if (!text) return;
    const pieces = this.rounds.at(-1)?.pieces;
    // Characters may straddle tokens; the last of these completed the text. The end of an answer has no token.
    if (pieces) pieces.push({ text, kind, source: sources?.at(-1) ?? pieces.at(-1)?.source ?? "target" });
  }
}

/** Tokens by source, the target's own first. */
export function countSources(rounds) {
  const counts = new Map([["target", 0]]);
  for (const round of rounds) {
    for (const source of round.sources) counts.set(source, (counts.get(source) ?? 0) + 1);
  }
  return counts;
}

/** What was drafted and accepted, by drafter: name -> { drafted, accepted }. */
export function countDrafts(rounds) {
  const counts = {};
  for (const draft of rounds.flatMap((round) => round.drafts)) {
    const count = (counts[draft.source] ??= { drafted: 0, accepted: 0 });
    count.drafted += 1;
    count.accepted += draft.accepted;
  }
  return counts;
}

/** How often the target came to a draft of each depth, and how often it accepted it: [{ judged, accepted }]. */
export function countDepths(rounds) {
  const depths = [];
  const at = (depth) => (depths[depth] ??= { judged: 0, accepted: 0 });
  for (const { drafts } of rounds) {
    let tip = -1;
    let depth = 0;
    drafts.forEach((draft, node) => {
      if (!draft.accepted) return;
      at(depth).judged += 1;
      at(depth).accepted += 1;
      tip = node;
      depth += 1;
    });
    if (drafts.some((draft) => draft.parent === tip && !draft.accepted)) at(depth).judged += 1;
  }
  return depths;
}

/** The refused drafts that the target would have said next, had it agreed: a path, from the top down. */
export function refusedPath(drafts) {
  let tip = drafts.reduce((last, draft, node) => (draft.accepted ? node : last), -1);
  const path = [];
  for (;;) {
    const next = drafts.findIndex((draft) => draft.parent === tip && !draft.accepted);
    if (next < 0) return path;
    path.push(drafts[next]);
    tip = next;
  }
}

/** Where two texts part: the index of the first character that differs; -1 where none does. */
export function firstDifference(one, other) {
  if (one === other) return -1;
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
