// What the server does now: its places, who waits, its cache, and what it did since it started.

import { html, useEffect, useState } from "./vendor/htm-preact-standalone.module.js";
import { getJson, getText } from "./api.js";
import { speedText } from "./figures.js";
import { sourceClass, sourceName } from "./tokens.js";

const EVERY_MS = 1000;

const JUDGED = { coupled: "coupled: the same text as plain decoding", rejection: "rejection: the same distribution of texts as plain decoding" };

/** Prometheus' text as samples: [{ name, labels, value }]. */
export function samplesOf(text) {
  return [...text.matchAll(/^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/gm)].map(([, name, labels, value]) => ({
    name,
    labels: Object.fromEntries([...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, each]) => [key, each])),
    value: Number(value),
  }));
}

function Place({ slot }) {
  const next = slot.next_token?.[0];
  return html`<li class=${slot.is_processing ? "place busy" : "place"}>
    <strong>Slot ${slot.id + 1}</strong>
    <span>${slot.is_processing ? "running" : "free"}</span>
    ${slot.is_processing && next && html`<span class="quiet"><span class="num">${next.n_decoded}</span> tokens written</span>`}
    ${slot.n_prompt_tokens != null && html`<span class="quiet"><span class="num">${slot.n_prompt_tokens}</span> tokens in ${slot.is_processing ? "use" : "its last request"}</span>`}
  </li>`;
}

function Fact({ name, children }) {
  return html`<div class="fact"><dt>${name}</dt><dd class="num">${children}</dd></div>`;
}

export function ServerView({ server, report, isShown }) {
  const { props } = server;
  const [slots, setSlots] = useState(null);
  const [samples, setSamples] = useState(null);

  useEffect(() => {
    if (!isShown) return undefined;
    const controller = new AbortController();
    let timer = 0;
    let failed = false;
    const look = async () => {
      try {
        if (!document.hidden) {
          if (props.endpoint_slots) setSlots(await getJson("slots", controller.signal));
          if (props.endpoint_metrics) setSamples(samplesOf(await getText("metrics", controller.signal)));
          if (failed) report(null);
          failed = false;
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        failed = true;
        report(error);
      }
      if (!controller.signal.aborted) timer = setTimeout(look, EVERY_MS);
    };
    look();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [isShown]);

  const one = (name) => samples?.find((sample) => sample.name === name)?.value;
  const by = (name, label) => Object.fromEntries(
    (samples ?? []).filter((sample) => sample.name === name).map((sample) => [sample.labels[label], sample.value]));
  const drafted = by("paceline:drafted_tokens_total", "drafter");
  const accepted = by("paceline:accepted_tokens_total", "drafter");
  const [decoding, plain] = [one("paceline:decode_seconds_total"), one("paceline:plain_decode_seconds_total")];
  const busy = slots?.filter((slot) => slot.is_processing).length;

  return html`<div class="view server">
    <h2>Server</h2>
    <dl class="facts">
      ${slots && html`<${Fact} name="Requests running">${busy} of ${slots.length}<//>`}
      ${samples && html`<${Fact} name="Requests waiting">${one("vllm:num_requests_waiting")}<//>`}
      ${samples && html`<${Fact} name="Cache in use">${(100 * (one("vllm:kv_cache_usage_perc") ?? 0)).toFixed(1)} %<//>`}
      ${samples && html`<${Fact} name="Tokens written">${one("vllm:generation_tokens_total")?.toLocaleString("en")}<//>`}
      ${samples && html`<${Fact} name="Average tokens/s">${speedText(one("llamacpp:predicted_tokens_seconds"))}<//>`}
      ${decoding > 0 && html`<${Fact} name="Gain since startup">${(plain / decoding).toFixed(2)}×<//>`}
    </dl>
    ${slots && html`<section class="card"><h3>Slots</h3><ul class="places">
      ${slots.map((slot) => html`<${Place} key=${slot.id} slot=${slot} />`)}
    </ul></section>`}
    ${!props.endpoint_slots && html`<p class="note">Running requests are not shown: the server was started with <code>--no-slots</code>.</p>`}
    ${!props.endpoint_metrics && html`<p class="note">Start the server with <code>--metrics</code> to see the queue, the cache and totals.</p>`}
    ${Object.keys(drafted).length > 0 && html`<section class="card"><table>
      <caption>Drafts since startup</caption>
      <thead><tr><th scope="col">Drafter</th><th scope="col">Drafted</th><th scope="col">Accepted</th></tr></thead>
      <tbody>${Object.keys(drafted).map((name) => html`<tr key=${name}>
        <th scope="row"><span class=${sourceClass(name)}>${sourceName(name)}</span></th>
        <td class="num">${drafted[name].toLocaleString("en")}</td><td class="num">${(accepted[name] ?? 0).toLocaleString("en")}</td>
      </tr>`)}</tbody>
    </table></section>`}
    <section class="card"><h3>Model</h3><dl class="about">
      <dt>Name</dt><dd>${props.model_alias}</dd>
      <dt>File</dt><dd>${props.model_path || "–"}</dd>
      <dt>Context per request</dt><dd class="num">${props.default_generation_settings.n_ctx}</dd>
      <dt>Parallel requests</dt><dd class="num">${props.total_slots}</dd>
      <dt>Drafters</dt><dd>${server.drafters.map(sourceName).join(", ") || "none"}</dd>
      <dt>Draft policy</dt><dd>${props.speculative.policy}</dd>
      <dt>Verification</dt><dd>${JUDGED[props.speculative.verify] ?? props.speculative.verify}</dd>
      <dt>Version</dt><dd>${props.build_info}</dd>
    </dl></section>
    <p class="quiet">For programs: OpenAI's and Anthropic's APIs are at <code>${new URL("v1", document.baseURI).href}</code>, llama-server's
      routes at their usual paths. <a href="openapi.json">openapi.json</a> describes all of them.</p>
  </div>`;
}
