// The page: the state of the controls, kept in the address; questions to the API; answers shown.

import { bytes, drawBar, drawParts, drawScatter, drawTimeline, element, seconds } from "/drawing.js";

const SLOW_AFTER_MS = 350, SPOKEN_AFTER_MS = 600, MAX_FLYING = 2, MAX_SLOW = 2;
const LOCAL = "(a folder or hub id)";
const LABELS = {
  task: { "sequence-classification": "Sequence classification", "token-classification": "Token classification",
    "question-answering": "Question answering", "masked-lm": "Masked language model", pretraining: "Pretraining", features: "Features only" },
  mask: { padded: "padded: hides padding", ones: "given, hides nothing", none: "none given" },
  attention: { "": "model’s own", sdpa: "sdpa", eager: "eager", packed: "packed: no padding" },
  freeze: { "": "nothing", embeddings: "embeddings", encoder: "encoder", backbone: "backbone" },
  lora: { "": "none", 4: "4", 8: "8", 16: "16", 32: "32", 64: "64" },
};
const $ = (id) => document.getElementById(id);
const form = $("job");
let catalogue, flying = 0, wanted = 0, sent = 0, shown = 0, movedAt = null;
let rowKey = null, planKey = null, slowTimer, spokenTimer, rowStop = new AbortController(), planStop = new AbortController();

// --- the state -----------------------------------------------------------------------------------------------------

function fill(select, values, labels = {}) {
  select.replaceChildren(...values.map((v) => element("option", { value: v, text: labels[v] ?? v })));
}

function build() {
  const { models, gpus, choices, defaults } = catalogue;
  const families = Map.groupBy ? Map.groupBy(models, (m) => m.family) : groupBy(models, (m) => m.family);
  $("model").replaceChildren(...[...families].map(([family, inside]) => element("optgroup", { label: family },
    ...inside.map((m) => element("option", { value: m.name, text: `${m.name} (${millions(m.num_parameters)})` })))));
  if (catalogue.allow_local) $("model").append(element("option", { value: LOCAL, text: "A folder or hub id …" }));
  const kinds = groupBy(gpus, (g) => g.kind);
  $("gpu").replaceChildren(...[...kinds].map(([kind, inside]) => element("optgroup", { label: kind.replace("-", " ") },
    ...inside.map((g) => element("option", { value: g.name, text: `${g.title.replace(/^NVIDIA /, "")}, ${bytes(g.total_memory_bytes)}` })))));
  fill($("task"), choices.task, LABELS.task);
  for (const name of ["precision", "optimizer", "mask"]) fill($(name), choices[name], LABELS[name]);
  for (const name of ["attention", "freeze", "lora"]) fill($(name), Object.keys(LABELS[name]).sort((a, b) => (a === "" ? -1 : b === "" ? 1 : 0)), LABELS[name]);
  $("batch").max = catalogue.max_batch;
  $("accumulate").max = catalogue.max_batch;
  $("allow").replaceChildren(...choices.allow.map((name) => element("label", {}, element("input", { type: "checkbox", name: "allow", value: name }), name)));
  $("about").textContent = `vramfit ${catalogue.version}, torch ${catalogue.torch_version}. Predicted here, on this machine; nothing is sent anywhere else.`;
  set(defaults);
}

function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) groups.set(key(item), [...(groups.get(key(item)) ?? []), item]);
  return groups;
}

const millions = (n) => (n < 1e9 ? `${Math.round(n / 1e6)} M` : `${(n / 1e9).toFixed(1)} B`);
const modelEntry = () => catalogue.models.find((m) => m.name === $("model").value);
const gpuEntry = () => catalogue.gpus.find((g) => g.name === $("gpu").value);
const longest = () => modelEntry()?.max_positions ?? catalogue.max_seq;

function seqStops() {
  const most = Math.min(longest(), catalogue.max_seq);
  const stops = catalogue.seq_stops.filter((n) => n <= most);
  return stops.at(-1) === most || most > catalogue.seq_stops.at(-1) ? stops : [...stops, most];
}

// The controls as they stand: name → value; what is not given has none.
function state() {
  const mode = form.elements.mode.value;
  const found = { model: $("model").value === LOCAL ? $("local").value.trim() : $("model").value, mode };
  for (const name of ["task", "gpu", "precision", "optimizer", "attention", "freeze", "lora", "mask"]) found[name] = $(name).value;
  for (const name of ["batch", "seq", "accumulate"]) found[name] = $(name).value.trim();
  for (const name of ["checkpointing", "quantize", "allocator", "loop"]) found[name] = $(name).checked ? $(name).value : "";
  for (const box of form.querySelectorAll("[data-modes]")) {
    const off = !box.dataset.modes.split(" ").includes(mode);
    box.classList.toggle("off", off);
    const control = box.querySelector("select, input");
    control.disabled = off;
    if (off) found[control.name] = "";
  }
  return found;
}

// Put values into the controls; those that no control can show are named.
function set(values) {
  const unknown = [];
  for (const [name, raw] of Object.entries(values)) {
    const value = String(raw), control = $(name);
    if (name === "mode") {
      const radio = [...form.elements.mode].find((r) => r.value === value);
      if (radio) radio.checked = true; else unknown.push([name, value]);
    } else if (name === "model" && catalogue.allow_local && !catalogue.models.some((m) => m.name === value)) {
      $("model").value = LOCAL;
      $("local").value = value;
    } else if (!control || !["SELECT", "INPUT"].includes(control.tagName)) {
      unknown.push([name, value]);
    } else if (control.type === "checkbox") {
      control.checked = value === control.value;
      if (value && !control.checked && value !== String(catalogue.defaults[name] ?? "")) unknown.push([name, value]);
    } else if (control.tagName === "SELECT" && ![...control.options].some((o) => o.value === value)) {
      if (["freeze", "lora"].includes(name) && /^[1-9][0-9]{0,3}$/.test(value)) {
        control.append(element("option", { value, text: name === "freeze" ? `${value} lowest layers` : value }));
        control.value = value;
      } else unknown.push([name, value]);
    } else control.value = value;
  }
  placeSliders();
  return unknown;
}

function placeSliders() {
  $("local-field").hidden = $("model").value !== LOCAL;
  $("seq").max = longest();
  for (const [name, stops, unit] of [["batch", catalogue.batch_stops, "samples"], ["seq", seqStops(), "tokens"]]) {
    const slider = $(`${name}-slider`), value = Number($(name).value) || 1;
    slider.max = stops.length - 1;
    let nearest = 0;
    stops.forEach((n, i) => { if (Math.abs(n - value) < Math.abs(stops[nearest] - value)) nearest = i; });
    slider.value = nearest;
    slider.setAttribute("aria-valuetext", `${value} ${unit}`);
  }
}

function query(values, without = []) {
  const given = Object.entries(values).filter(([name, value]) => value !== "" && !without.includes(name));
  return new URLSearchParams(given.filter(([name, value]) => String(catalogue.defaults[name] ?? "") !== value));
}

const allowed = () => [...$("allow").querySelectorAll(":checked")].map((box) => box.value).join(",");

function keepInAddress(values) {
  const kept = query(values);
  if (allowed()) kept.set("allow", allowed());
  const text = kept.toString();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}

function readAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.search));
  for (const box of $("allow").querySelectorAll("input")) box.checked = (given.allow ?? "").split(",").includes(box.value);
  delete given.allow;
  const empty = Object.fromEntries(["attention", "freeze", "lora", "checkpointing", "quantize", "allocator", "loop"].map((n) => [n, ""]));
  return set({ ...empty, ...catalogue.defaults, ...given });
}

// --- questions -----------------------------------------------------------------------------------------------------

async function ask(path, parameters, signal) {
  const response = await fetch(`${path}?${parameters}`, { signal, headers: { Accept: "application/json" } });
  const body = await response.json();
  return { ok: response.ok, status: response.status, body };
}

function changed(movedNow = true) {
  if (movedNow) movedAt = performance.now();
  wanted += 1;
  const values = state();
  keepInAddress(values);
  send();
  clearTimeout(slowTimer);
  slowTimer = setTimeout(askSlowly, SLOW_AFTER_MS);
}

// The newest question goes out at once, unless two are on their way: then it waits for one of them.
async function send() {
  if (flying >= MAX_FLYING || sent === wanted) return;
  const number = (sent = wanted), began = movedAt, values = state();
  flying += 1;
  try {
    const { ok, body } = await ask("/api/estimate", query(values));
    if (number > shown) {
      shown = number;
      if (ok) show(body, values); else refuse(body);
      if (began !== null) requestAnimationFrame(() => performance.measure("vramfit-figure", { start: began, end: performance.now(), detail: { number } }));
    }
  } catch (error) {
    if (number > shown) refuse({ error: "The server does not answer.", hint: "Is vramfit web still running?", problems: [] });
  } finally {
    flying -= 1;
    send();
  }
}

function askSlowly() {
  const values = state();
  const forRow = query(values, ["batch", "gpu"]).toString();
  if (forRow !== rowKey) {
    rowKey = forRow;
    rowStop.abort();
    rowStop = new AbortController();
    askRow(forRow, rowStop.signal);
  } else markRow();
  const forPlan = new URLSearchParams(query(values, ["mode", "accumulate", "precision", "attention", "checkpointing", "freeze",
    "optimizer", "lora", "quantize", "allocator", "loop"]));
  forPlan.set("batch", values.batch); // the API's own default is another
  if (allowed()) forPlan.set("allow", allowed());
  const isTraining = values.mode === "train";
  $("plan-card").hidden = !isTraining;
  if (isTraining && forPlan.toString() !== planKey) {
    planKey = forPlan.toString();
    planStop.abort();
    planStop = new AbortController();
    askPlan(forPlan, planStop.signal);
  }
}

async function askRow(parameters, signal) {
  const row = $("row"), names = catalogue.row_of_gpus;
  const cells = names.map((name) => rowCell(catalogue.gpus.find((g) => g.name === name)));
  row.replaceChildren(...cells.map((c) => c.item));
  markRow();
  const found = new Array(names.length).fill(0), waiting = names.map((_, i) => i);
  async function next() {
    while (waiting.length) {
      const i = waiting.shift(), given = new URLSearchParams(parameters);
      given.set("gpu", names[i]);
      const { ok, body } = await ask("/api/max-batch", given, signal);
      cells[i].number.replaceChildren(ok ? body.batch.toLocaleString("en") : "–");
      cells[i].button.setAttribute("aria-label", ok
        ? `${cells[i].gpu.title}: largest batch ${body.batch}` : `${cells[i].gpu.title}: ${body.error}`);
      if (!ok) cells[i].note.replaceChildren(element("span", { class: "why", text: shorten(body.error) }));
      else cells[i].button.title = body.batch ? `What limits it: ${body.limited_by}` : "Not even one sample fits";
      found[i] = ok ? body.batch : 0;
      const most = Math.log2(1 + Math.max(...found, 1));
      cells.forEach((c, k) => { c.level.style.width = `${(100 * Math.log2(1 + found[k])) / most}%`; });
    }
  }
  try {
    await Promise.all(Array.from({ length: MAX_SLOW }, next));
  } catch (error) {
    if (error.name !== "AbortError") cells.forEach((c) => { if (c.number.querySelector(".skeleton")) c.number.textContent = "–"; });
  }
}

const shorten = (text) => text.replace(/^[^:]*: /, "").split(";")[0];

function rowCell(gpu) {
  const number = element("span", { class: "n" }, element("span", { class: "skeleton" }));
  const note = element("span", { class: "m", text: bytes(gpu.total_memory_bytes) });
  const level = element("i");
  const button = element("button", { type: "button", "data-gpu": gpu.name, "aria-pressed": "false" },
    element("span", { class: "g", text: gpu.title.replace(/^NVIDIA (GeForce )?/, "") }), note, number, element("span", { class: "track" }, level));
  button.addEventListener("click", () => { $("gpu").value = gpu.name; changed(); });
  return { item: element("li", {}, button), number, button, note, level, gpu };
}

function markRow() {
  for (const button of $("row").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.gpu === $("gpu").value));
}

async function askPlan(parameters, signal) {
  const place = $("plan");
  place.setAttribute("aria-busy", "true");
  place.classList.add("busy");
  try {
    const { ok, body } = await ask("/api/plan", parameters, signal);
    if (!ok) place.replaceChildren(element("p", { class: "quiet", text: body.error }));
    else if (body.found) showPlan(body.found); else showMissing(body.missing);
    place.classList.remove("busy");
    place.setAttribute("aria-busy", "false");
  } catch (error) {
    if (error.name !== "AbortError") place.replaceChildren(element("p", { class: "quiet", text: "The server does not answer." }));
  }
}

// --- answers -------------------------------------------------------------------------------------------------------

const MARKS = { good: "✓", tight: "!", bad: "✗", open: "·" };

function show(answer, values) {
  const gpu = gpuEntry(), card = $("answer");
  card.dataset.tone = answer.tone;
  document.body.classList.remove("stale", "empty");
  $("asked").textContent = sentence(answer);
  $("mark").textContent = MARKS[answer.tone];
  $("headline-text").textContent = answer.headline;
  $("details").replaceChildren(...answer.details.map((text) => element("p", { text })));
  drawBar($("bar"), answer, gpu ? gpu.title.replace(/^NVIDIA (GeForce )?/, "") : "memory");
  drawParts($("parts").tBodies[0], answer, values.mode);
  $("step-title").textContent = values.mode === "train" ? "One step, from left to right" : "One batch, from left to right";
  drawTimeline($("timeline"), answer);
  $("when").textContent = `${bytes(answer.peak_allocated_bytes)} allocated, ${answer.peak}.`;
  $("figures").replaceChildren(...[
    ["requested", answer.peak_requested_bytes], ["allocated", answer.peak_allocated_bytes],
    ["reserved", answer.peak_reserved_bytes], ["process", answer.peak_process_bytes],
  ].map(([name, size]) => element("div", {}, element("dt", { text: name }),
    element("dd", { text: bytes(size) }, element("small", { class: "quiet", text: `${size.toLocaleString("en")} B` })))));
  if (answer.step_time_s) {
    $("figures").append(element("div", {}, element("dt", { text: values.mode === "train" ? "a step, about" : "a batch, about" }),
      element("dd", { text: seconds(answer.step_time_s) }, element("small", { class: "quiet", text: `${Number(answer.samples_per_s.toPrecision(3))} samples/s` }))));
  }
  $("largest").tBodies[0].replaceChildren(...answer.largest.map((g) => element("tr", {},
    element("th", { scope: "row" }, element("i", { class: `swatch c-${g.category}` }), g.what),
    element("td", { class: "wide", text: g.module }), element("td", { class: "number", text: g.num_blocks }),
    element("td", { class: "number", text: bytes(g.allocated_bytes) }))));
  const basis = answer.basis === "verified" ? ["Verified: this torch on this architecture was compared with measurements."] : [];
  $("notes").replaceChildren(...[...basis, ...answer.notes].map((text) => element("li", { text: stop(capital(text)) })));
  $("command").textContent = answer.command;
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
  document.title = `${MARKS[answer.tone]} ${answer.headline} · vramfit`;
  speak(`${answer.headline}. ${answer.details[0] ?? ""}`);
}

function sentence(answer) {
  const s = answer.settings, extra = ["optimizer", "checkpointing", "freeze", "lora", "quantize", "allocator", "loop"].filter((n) => n in s && s[n] !== null);
  return [s.model, s.mode, `batch ${s.batch} × ${s.seq} tokens`, s.precision, s.attention, ...extra.map((n) => (n === "optimizer" ? s[n] : `${n} ${s[n]}`))].filter(Boolean).join(" · ");
}

const capital = (text) => (text.split(" ")[0].includes("-") ? text : text.charAt(0).toUpperCase() + text.slice(1));
const stop = (text) => (/[.!?…]$/.test(text) ? text : `${text}.`);

function refuse(problem) {
  const card = $("answer"), reasons = problem.problems.length ? problem.problems : [problem.error];
  card.dataset.tone = "refused";
  document.body.classList.add("stale");
  $("mark").textContent = "✗";
  $("headline-text").textContent = "Not possible";
  const said = (text) => stop($(text.split(/[ :]/)[0]) ? text : capital(text)); // a keyword stays as it is
  $("asked").textContent = "";
  $("details").replaceChildren(...reasons.map((text) => element("p", { text: said(text) })));
  if (problem.hint && !problem.hint.startsWith("/docs")) $("details").append(element("p", { text: stop(capital(problem.hint)) }));
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
  for (const reason of reasons) {
    const control = $(reason.split(/[ :]/)[0]);
    if (control && form.contains(control)) control.setAttribute("aria-invalid", "true");
  }
  document.title = "✗ Not possible · vramfit";
  speak(`Not possible: ${reasons.join("; ")}`);
}

function speak(text) {
  clearTimeout(spokenTimer);
  spokenTimer = setTimeout(() => { $("spoken").textContent = text; }, SPOKEN_AFTER_MS);
}

function command(text, label) {
  return element("div", { class: "command" }, element("code", { text, tabindex: "0", "aria-label": label }),
    element("button", { type: "button", "data-text": text, text: "Copy", "aria-label": `Copy: ${label}` }));
}

function showPlan(plan) {
  const use = element("button", { type: "button", class: "main", text: "Use these settings" });
  use.addEventListener("click", () => usePlan(plan.settings));
  const rows = plan.reasons.map((r) => element("tr", {},
    element("th", { scope: "row", text: r.setting }),
    element("td", {}, element("span", { class: `kind ${r.kind.split(" ")[0]}`, text: r.kind_in_words })),
    element("td", { text: `${stop(capital(r.why))}${r.cost ? ` Costs in quality: ${r.cost}.` : ""}` })));
  const scatter = element("div", { class: "scatter" });
  const others = element("details", { open: true }, element("summary", { text: "What else was possible: memory against time" }), scatter);
  if (plan.alternatives.length) drawScatter(scatter, plan);
  $("plan").replaceChildren(
    element("div", { class: "plan-head" }, element("p", { text: `${plan.headline}; about ${seconds(plan.step_time_s)} a step.` }), use),
    element("p", { class: "quiet", text: `At most ${bytes(plan.safe_reserved_bytes)} of ${bytes(plan.budget_bytes)}. ${stop(capital(plan.margin_reason))}` }),
    element("table", { class: "plan-table" }, element("thead", {}, element("tr", {}, ...["Setting", "Class", "Why"].map((t) => element("th", { scope: "col", text: t })))),
      element("tbody", {}, ...rows)),
    ...(plan.alternatives.length ? [others] : []),
    element("h3", { text: "To run it" }), command(plan.commands.plan, "the command that saves the plan"),
    ...(plan.commands.train ? [command(plan.commands.train, "the command that trains by it")] : []));
}

function showMissing(missing) {
  $("plan").replaceChildren(
    element("div", { class: "plan-head" }, element("p", { text: `✗ No plan fits: ${bytes(missing.shortfall_bytes)} too little` })),
    element("p", { text: stop(missing.error) }),
    ...(missing.hint ? [element("p", { class: "quiet", text: `What would do: ${missing.hint}.` })] : []));
}

function usePlan(settings) {
  const given = {};
  for (const name of ["precision", "attention", "checkpointing", "freeze", "optimizer", "lora", "quantize", "allocator", "loop", "accumulate"]) {
    given[name] = settings[name] ?? catalogue.defaults[name] ?? "";
  }
  given.loop = settings.loop ?? "";
  set(given);
  changed();
  $("answer").scrollIntoView({ block: "nearest" });
}

// --- hands ---------------------------------------------------------------------------------------------------------

function listen() {
  for (const [name, stops] of [["batch", () => catalogue.batch_stops], ["seq", seqStops]]) {
    const slider = $(`${name}-slider`);
    slider.addEventListener("input", () => {
      $(name).value = stops()[Number(slider.value)];
      slider.setAttribute("aria-valuetext", `${$(name).value} ${name === "batch" ? "samples" : "tokens"}`);
      changed();
    });
  }
  form.addEventListener("input", (event) => {
    if (event.target.type === "range") return;
    if (event.target.id === "model" && Number($("seq").value) > longest()) $("seq").value = longest();
    placeSliders();
    changed();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  $("allow").addEventListener("input", () => changed());
  window.addEventListener("popstate", () => { readAddress(); changed(false); });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy], button[data-text]");
    if (!button) return;
    const text = button.dataset.text ?? $(button.dataset.copy).textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Ctrl-C"; select(button.previousElementSibling); }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

function select(node) {
  const range = document.createRange();
  range.selectNodeContents(node);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}

async function begin() {
  try {
    catalogue = (await ask("/api/catalogue", "")).body;
  } catch {
    refuse({ error: "The server does not answer.", hint: "Is vramfit web still running?", problems: [] });
    return;
  }
  build();
  const unknown = readAddress();
  listen();
  movedAt = performance.now();
  changed();
  if (unknown.length) {
    const said = unknown.map(([name, value]) => `${name} “${value.slice(0, 60)}”`).join(", ");
    form.prepend(element("p", { class: "notice", role: "alert", text: `The address asks for ${said}, which is not known here and was left out.` }));
  }
}

begin();
