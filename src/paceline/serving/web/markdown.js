// A model's markdown as markup. What a model writes is not to be trusted: nothing of it runs, loads or styles anything.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
];

const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

function spelled(text) {
  return text.replace(/[&<>"']/g, (sign) => SIGNS[sign]);
}

const marked = new Marked({
  gfm: true,
  renderer: {
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

/** Return markup that may be put into the page as it is. */
export function toMarkup(text) {
  return DOMPurify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "start"],
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    RETURN_TRUSTED_TYPE: true,
  });
}
