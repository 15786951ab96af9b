// A conversation: its turns, what is sent of them, and its form in the browser's store and in files.

import { Answer } from "./answer.js";

const TITLE_LENGTH = 60;

const isText = (value) => typeof value === "string";

// `crypto.randomUUID` is there on secure origins alone.
const newId = () => [...crypto.getRandomValues(new Uint32Array(3))].map((part) => part.toString(36)).join("");

/** A message's text, with the files that go with it. A fence longer than any in the file is its end. */
function withFiles({ asked, files }) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...parts, asked].filter(Boolean).join("\n\n");
}

/**
 * A turn is { parent, asked, files, results, answer }: a message with files ({ name, text }) or the results of tool calls
 * ({ id, text }), and its answer. Turns form a tree: `parent` is the index of the turn before, -1 for the first. A message
 * that is edited or answered again begins another branch. The one that ends with turn `leaf` is shown.
 */
export class Conversation {
  constructor({ id = newId(), title = "", system = "", updated = 0, leaf = -1, turns = [] } = {}) {
    Object.assign(this, { id, title, system, updated, leaf, turns });
  }

  /** Return what a store or a file has; null where that is something else. What is broken of it is left out. */
  static read(value) {
    if (Array.isArray(value?.messages) && !Array.isArray(value.turns)) return Conversation.fromMessages(value.messages);
    if (!isText(value?.id) || !Array.isArray(value.turns)) return null;
    const isTurn = (turn) => turn !== null && typeof turn === "object";
    const turns = value.turns.filter(isTurn).map(({ parent, asked, files, results, answer }, index) => ({
      parent: Number.isInteger(parent) && parent >= -1 && parent < index ? parent : index - 1,
      asked: isText(asked) ? asked : "",
      files: (Array.isArray(files) ? files : []).filter((file) => isText(file?.name) && isText(file.text)),
      results: (Array.isArray(results) ? results : []).filter((result) => isText(result?.id) && isText(result.text)),
      answer: Answer.kept({
        content: isText(answer?.content) ? answer.content : "",
        reasoning: isText(answer?.reasoning) ? answer.reasoning : "",
        calls: (Array.isArray(answer?.calls) ? answer.calls : []).filter((call) => isText(call?.name) && isText(call.arguments)),
        finish: answer?.finish ?? null,
        contextUsed: Number(answer?.contextUsed) || 0,
        note: isText(answer?.note) ? answer.note : "",
      }),
    }));
    return new Conversation({
      id: value.id,
      title: isText(value.title) ? value.title : "",
      system: isText(value.system) ? value.system : "",
      updated: Number(value.updated) || 0,
      leaf: Number.isInteger(value.leaf) && value.leaf in turns ? value.leaf : turns.length - 1,
      turns,
    });
  }

  /** Messages of OpenAI's form, as `/save` in the terminal writes them. */
  static fromMessages(messages) {
    const made = new Conversation({ updated: Date.now() });
    const textOf = ({ content }) => (Array.isArray(content) ? content.map((part) => part?.text ?? "").join("\n") : content ?? "");
    for (const message of messages.filter((each) => isText(each?.role))) {
      const last = made.turns.at(-1);
      if (message.role === "assistant") {
        const calls = (message.tool_calls ?? []).map(({ id, function: { name, arguments: text } }) => ({ id, name, arguments: text }));
        const answer = Answer.kept({ content: textOf(message), reasoning: message.reasoning_content ?? "", calls, finish: "stop" });
        if (last && last.answer.isEmpty) last.answer = answer;
        else made.add({ answer });
      } else if (message.role === "tool") {
        const result = { id: message.tool_call_id ?? "", text: textOf(message) };
        if (last?.results.length && last.answer.isEmpty) last.results.push(result);
        else made.add({ results: [result] });
      } else if (message.role === "user") made.add({ asked: textOf(message) });
      else made.system = textOf(message);
    }
    return made.turns.length || made.system ? made : null;
  }

  toJSON() {
    const { id, title, system, updated, leaf } = this;
    return { id, title, system, updated, leaf, turns: this.turns.map((turn) => ({ ...turn, answer: turn.answer.toJSON() })) };
  }

  /** For a file, which programs that read OpenAI's messages can use. */
  exported() {
    return { messages: this.messages(this.leaf), ...this.toJSON() };
  }

  get name() {
    const first = this.turns[0];
    const line = (first?.asked || first?.files[0]?.name || "").trim().split("\n")[0];
    return this.title || (line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).replace(/\s+\S*$/, "")}…` : line) || "New chat";
  }

  /** Whether each of some words, in lower case, is in its title or texts. */
  has(words) {
    const texts = this.turns.flatMap(({ asked, files, answer }) => [asked, answer.content, ...files.map((file) => file.name)]);
    const all = [this.title, ...texts].join("\n").toLowerCase();
    return words.every((word) => all.includes(word));
  }

  /** Indices of the turns that lead to one, which is the last. */
  branch(end = this.leaf) {
    const found = [];
    for (let index = end; index >= 0; index = this.turns[index].parent) found.unshift(index);
    return found;
  }

  /** Indices of the turns that follow the same one. */
  siblings(index) {
    return this.turns.flatMap((turn, each) => (turn.parent === this.turns[index].parent ? [each] : []));
  }

  /** Show the branch of a turn, to its latest end. */
  choose(index) {
    this.leaf = index;
    this.turns.forEach((turn, each) => {
      if (turn.parent === this.leaf) this.leaf = each;
    });
  }

  /** Add a turn, by default after the last one that is shown; return its index. */
  add({ parent = this.leaf, asked = "", files = [], results = [], answer = Answer.kept({}) }) {
    this.leaf = this.turns.push({ parent, asked, files, results, answer }) - 1;
    this.updated = Date.now();
    return this.leaf;
  }

  /** Where the next message goes: what an answer without a text left behind is no part of the conversation. */
  get end() {
    return this.leaf >= 0 && this.turns[this.leaf].answer.isEmpty ? this.turns[this.leaf].parent : this.leaf;
  }

  /** What is sent to have a turn answered, or with `continues` to have its answer continued: OpenAI's messages. */
  messages(index, { continues = false } = {}) {
    const found = this.system.trim() ? [{ role: "system", content: this.system }] : [];
    const branch = this.branch(index);
    for (const { asked, files, results, answer } of branch.map((each) => this.turns[each])) {
      const isLast = answer === this.turns[index].answer;
      if (asked || files.length) found.push({ role: "user", content: withFiles({ asked, files }) });
      found.push(...results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text })));
      if (answer.isEmpty) continue;
      const calls = answer.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
      const message = { role: "assistant", content: answer.content };
      if (calls.length) message.tool_calls = calls;
      // Templates leave out what was reasoned before.
      if (isLast && continues && answer.reasoning) {
        message.reasoning_content = answer.reasoning;
        if (!answer.content) delete message.content;
      }
      found.push(message);
    }
    return found;
  }

  /** What is sent to have a turn answered that is not there yet. */
  messagesWith({ parent, asked = "", files = [], results = [] }) {
    const extended = new Conversation({ system: this.system, leaf: parent, turns: [...this.turns] });
    return extended.messages(extended.add({ asked, files, results }));
  }
}
