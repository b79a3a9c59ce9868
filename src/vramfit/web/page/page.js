// The page: questions to the API when a hand moves something.

import { refuse, show, showMissing, showPlan } from "/answers.js";
import { bytes, element } from "/drawing.js";
import { $, allowed, build, catalogue, form, keepInAddress, longest, placeSliders, query, readAddress, seqStops, set, state } from "/state.js";

const SLOW_AFTER_MS = 350, MAX_FLYING = 2, MAX_SLOW = 2;
let flying = 0, wanted = 0, sent = 0, shown = 0, movedAt = null;
let rowKey = null, planKey = null, slowTimer, rowStop = new AbortController(), planStop = new AbortController();

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
    "optimizer", "lora", "quantize", "allocator", "casts", "loop"]));
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
      else cells[i].button.title = body.batch
        ? `${body.margin_batch} with the margin that plans keep: ${body.margin_reason}. What limits it: ${body.limited_by}` : "Not even one sample fits";
      found[i] = ok ? body.batch : 0;
      const most = Math.max(...found, 1);
      cells.forEach((c, k) => { c.level.style.width = `${(100 * found[k]) / most}%`; });
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
    else if (body.found) showPlan(body.found, usePlan); else showMissing(body.missing);
    place.classList.remove("busy");
    place.setAttribute("aria-busy", "false");
  } catch (error) {
    if (error.name !== "AbortError") place.replaceChildren(element("p", { class: "quiet", text: "The server does not answer." }));
  }
}

function usePlan(settings) {
  const given = {};
  for (const name of ["precision", "attention", "checkpointing", "freeze", "optimizer", "lora", "quantize", "allocator", "casts", "loop", "accumulate"]) {
    given[name] = settings[name] ?? catalogue.defaults[name] ?? "";
  }
  given.loop = settings.loop ?? "";
  set(given);
  changed();
  $("answer").scrollIntoView({ block: "nearest" });
}

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
    build((await ask("/api/catalogue", "")).body);
  } catch {
    refuse({ error: "The server does not answer.", hint: "Is vramfit web still running?", problems: [] });
    return;
  }
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
