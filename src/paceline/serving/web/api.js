// Asking the server. Every path is relative to the server's root, which an --api-prefix may have moved.

export const ROOT = new URL("../", import.meta.url);
const KEY = "paceline-key";

/** What the server, or the way to it, says is wrong: one line. `status` is 0 where no answer came. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(String(message).split("\n")[0]);
    this.status = status;
  }
}

// The key is kept for this tab alone, and no longer than it is open. Storage may be switched off.
let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // Then it is kept in memory.
}

export function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(KEY, given);
  } catch {
    // As above.
  }
}

// Of a server that has several.
let model = "";

/** Have all that follows ask this model. */
export function setModel(name) {
  model = name;
}

async function ask(path, { body, signal } = {}) {
  const url = new URL(path, ROOT);
  if (model && body === undefined) url.searchParams.set("model", model);
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(url, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(model ? { model, ...body } : body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer: is it still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status);
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, response.status);
  }
}

export async function getJson(path, signal) {
  return (await ask(path, { signal })).json();
}

export async function getText(path, signal) {
  return (await ask(path, { signal })).text();
}

/** Iterate over the JSON of a stream's events. Leaving early closes the connection, which ends the answer. */
export async function* stream(path, body, signal) {
  const response = await ask(path, { body: { ...body, stream: true }, signal });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        // Comments keep a silent connection open.
        if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
