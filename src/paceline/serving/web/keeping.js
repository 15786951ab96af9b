// What the browser keeps for this page: conversations (IndexedDB), settings and the model (localStorage). The server keeps
// none of it.

import { createStore, del, set, values } from "./vendor/idb-keyval.js";
import { ROOT } from "./api.js";

// Servers of one address may differ in their prefix.
const NAME = `paceline:${ROOT.pathname}`;
const store = createStore(NAME, "conversations");

/** Conversations in the form of `Conversation.toJSON`. These three reject where the browser keeps nothing for the page. */
export const keptConversations = () => values(store);
export const keepConversation = (conversation) => set(conversation.id, conversation.toJSON(), store);
export const dropConversation = (id) => del(id, store);

/** Return what was kept under a name; undefined where that is nothing, or broken. */
export function kept(name) {
  try {
    return JSON.parse(localStorage.getItem(`${NAME}${name}`)) ?? undefined;
  } catch {
    return undefined;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`${NAME}${name}`, JSON.stringify(value));
  } catch {
    // It is switched off, or full.
  }
}
