// A model's markdown as markup. What a model writes is not to be trusted: nothing of it runs, loads or styles anything.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
];

const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

function spelled(text) {
  return text.replace(/[&<>"']/g, (sign) => SIGNS[sign]);
}

// Libraries that few answers need are loaded with the first of these. Until then their part is shown as it was written.
const libraries = {};
const listeners = new Set();
const MODULES = { highlight: "./vendor/highlight.min.js", temml: "./vendor/temml.esm.js" };

function library(name) {
  libraries[name] ??= import(MODULES[name]).then((module) => {
    libraries[name] = { module: module.default };
    made.clear();
    listeners.forEach((listener) => listener());
  }, () => {
    // It cannot be had; what was written stays.
  });
  return libraries[name].module;
}

/** Have a function called whenever texts would be shown better than before; return what ends that. */
export function whenMore(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

// Each has its colours anew while it is written.
const MAX_HIGHLIGHTED = 50000;

function code({ text, lang }) {
  const language = /^[\w+#.-]+/.exec(lang ?? "")?.[0].toLowerCase() ?? "";
  const highlight = language && text.length <= MAX_HIGHLIGHTED ? library("highlight") : null;
  const inner = highlight?.getLanguage(language) ? highlight.highlight(text, { language, ignoreIllegals: true }).value : spelled(text);
  return `<pre><code class="${language && `language-${language}`}">${inner}\n</code></pre>\n`;
}

function math({ type, raw, text }) {
  const displayMode = /^\s*(?:\$\$|\\\[)/.test(raw);
  // Inline styles are barred by the page's policy.
  const rendered = library("temml")?.renderToString(text, { displayMode, throwOnError: false }).replace(/ style="[^"]*"/g, "");
  const markup = rendered && !rendered.includes("temml-error") ? rendered : `<code>${spelled(raw.trim())}</code>`;
  return type === "blockFormula" ? `<p>${markup}</p>\n` : markup;
}

// As pandoc has it: a dollar that opens has no space behind it, and one that closes none before it and no digit behind it.
const FORMULAS = [
  ["block", /\n {0,3}(?:\$\$|\\\[)/, /^ {0,3}(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/],
  ["inline", /\$|\\[([]/, /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\]|\$(?!\s)((?:\\[^]|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\(([^]+?)\\\))/],
];

const marked = new Marked({
  gfm: true,
  // Models write poems and addresses without the two spaces that markdown asks for.
  breaks: true,
  extensions: FORMULAS.map(([level, start, rule]) => ({
    name: `${level}Formula`,
    level,
    start: (source) => { const at = source.search(start); return at < 0 ? undefined : at; },
    tokenizer: (source) => {
      const found = rule.exec(source);
      if (!found) return undefined;
      return { type: `${level}Formula`, raw: found[0], text: found.slice(1).find((each) => each !== undefined).trim() };
    },
    renderer: math,
  })),
  renderer: {
    code,
    // Markup in an answer is shown as it was written, and a picture by its name: neither is what a model is asked for.
    html: ({ text }) => spelled(text),
    image: ({ text }) => spelled(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});
// Links lead to other servers alone, and classes are those of code and formulas.
const VALUES = { href: /^(?:https?|mailto):/i, class: /^(?:hljs-|language-|tml-)/ };
DOMPurify.addHook("uponSanitizeAttribute", (node, data) => {
  if (VALUES[data.attrName]) data.keepAttr = VALUES[data.attrName].test(data.attrValue);
});

function purified(markup) {
  return DOMPurify.sanitize(markup, {
    USE_PROFILES: { mathMl: true },
    ADD_TAGS: TAGS,
    ADD_ATTR: ["href", "start", "class"],
    FORBID_ATTR: ["style", "id", "name"],
    RETURN_TRUSTED_TYPE: true,
  });
}

// Of a text that is being written all blocks but the last are as they were.
const made = new Map();
const MAX_MADE = 2000;

/** Return the markup of each block of a text, which may be put into the page as it is. */
export function toBlocks(text) {
  const tokens = marked.lexer(text);
  const links = JSON.stringify(tokens.links);
  const blocks = tokens.filter((token) => token.type !== "space" && token.type !== "def");
  return blocks.map((token, index) => {
    const key = links + token.raw;
    const markup = made.get(key) ?? purified(marked.parser([token]));
    if (index < blocks.length - 1) {
      if (made.size >= MAX_MADE) made.clear();
      made.set(key, markup);
    }
    return markup;
  });
}
