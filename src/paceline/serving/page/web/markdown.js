// A model's markdown as markup. What a model writes is not to be trusted: nothing of it runs, loads or styles anything.

import { marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
];

globalThis.DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** Return markup that may be put into the page as it is. */
export function toMarkup(text) {
  return globalThis.DOMPurify.sanitize(marked.parse(text, { gfm: true }), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "start"],
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    RETURN_TRUSTED_TYPE: true,
  });
}
