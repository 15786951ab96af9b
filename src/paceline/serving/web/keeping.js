// The conversation, kept by the browser: a reload finds that of its tab again, and a new tab the latest one.

// Servers of one address may differ in their prefix.
const KEY = `paceline-chat:${new URL("../", import.meta.url).pathname}`;
// Characters. Beyond them the first turns are let go of; browsers have room for some five million.
const MAX = 1000000;
const STORES = ["sessionStorage", "localStorage"];

/** Keep turns: [{ asked, text, finish }]. */
export function keepTurns(turns) {
  let kept = turns;
  let written = JSON.stringify(kept);
  while (written.length > MAX) {
    kept = kept.slice(1);
    written = JSON.stringify(kept);
  }
  for (const store of STORES) {
    try {
      globalThis[store].setItem(KEY, written);
    } catch {
      // It is switched off, or full.
    }
  }
}

/** Return the turns that were kept; none where what lies there is something else. */
export function keptTurns() {
  for (const store of STORES) {
    try {
      const written = globalThis[store].getItem(KEY);
      if (written === null) continue;
      return JSON.parse(written).filter((turn) => typeof turn?.asked === "string" && typeof turn.text === "string");
    } catch {
      // As above, or broken.
    }
  }
  return [];
}
