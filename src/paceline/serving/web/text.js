// A text that the model continues, in tokens by source, with its figures beside it.

import { html, useState } from "./vendor/htm-preact-standalone.module.js";
import { CopyButton, Written, useAnswering } from "./answering.js";
import { Figures } from "./figures.js";
import { Settings } from "./settings.js";
import { useFocusKept } from "./writing.js";

export function Text({ server, settings, change, announce, report, isShown }) {
  const [prompt, setPrompt] = useState("def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n");
  const [{ begun, answer }, setWritten] = useState({ begun: "", answer: null });
  const [isLooking, setLooking] = useState(false);
  const [busy, ask, cancel] = useAnswering({ view: "text", settings, change, announce, report, isShown });
  const box = useFocusKept(isShown);
  const write = (from, content) => ask("completion", { prompt: from + content }, (made) => {
    setWritten({ begun: from, answer: made });
    setLooking(false);
  }, { beginning: { content } });
  const buttons = answer && html`<${CopyButton} text=${begun + answer.content} announce=${announce} />
    ${answer.isCut && !busy && html`<button type="button" class="small" onClick=${() => write(begun, answer.content)}>Continue</button>`}`;
  return html`<div class="view beside">
    <h2>Text</h2>
    <div class="main">
      <form class="card ask" onSubmit=${(event) => { event.preventDefault(); write(prompt, ""); }}>
        <label for="text-prompt">Text to continue</label>
        <textarea id="text-prompt" rows="6" ref=${box} value=${prompt} onInput=${(event) => setPrompt(event.target.value)}></textarea>
        <div class="actions">
          <button class="primary" disabled=${busy || !prompt}>Generate</button>
          ${busy && html`<button type="button" aria-keyshortcuts="Escape" title="Escape" onClick=${cancel}>Stop</button>`}
        </div>
      </form>
      ${answer && html`<article class="turn card" aria-label="Answer">
        <${Written} answer=${answer} settings=${settings} view="text" change=${change} isLooking=${isLooking} look=${setLooking}
          announce=${announce} buttons=${buttons} />
      </article>`}
    </div>
    <div class="side">
      <section class="card" aria-label="Settings"><${Settings} name="text" settings=${settings} change=${change} defaults=${server.props.default_generation_settings.params} /></section>
      <${Figures} answer=${answer} />
    </div>
  </div>`;
}
