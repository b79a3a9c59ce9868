// The page: asks the API when a control changes.

import { gpuName, refuse, show, showMissing, showPlan, wait } from "/answers.js";
import { bytes, element } from "/drawing.js";
import { $, allowed, blank, build, catalogue, form, keepInAddress, longest, placeSliders, query, readAddress, seqStops, set, state } from "/state.js";

const NO_ANSWER = { error: "The server does not answer.", hint: "Is vramfit web still running?", problems: [] };
const SLOW_AFTER_MS = 350, MAX_FLYING = 2, MAX_SLOW = 2;
let flying = 0, wanted = 0, sent = 0, shown = 0, movedAt = null;
let rowKey = null, planKey = null, slowTimer, rowStop = new AbortController(), planStop = new AbortController(), cells = [];

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
  wait(values);
  try {
    const { ok, body } = await ask("/api/estimate", query("/api/estimate", values));
    if (number > shown) {
      shown = number;
      if (ok) show(body, values); else refuse(body);
      if (began !== null) requestAnimationFrame(() => performance.measure("vramfit-figure", { start: began, end: performance.now(), detail: { number } }));
    }
  } catch (error) {
    if (number > shown) refuse(NO_ANSWER);
  } finally {
    flying -= 1;
    if (shown === wanted) document.body.classList.remove("asking");
    send();
  }
}

function askSlowly() {
  const values = state();
  const forRow = query("/api/max-batch", values, ["gpu"]).toString();
  if (forRow !== rowKey) {
    rowKey = forRow;
    rowStop.abort();
    rowStop = new AbortController();
    askRow(forRow, rowStop.signal);
  } else markRow();
  const forPlan = query("/api/plan", values);
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

// Numbers that stand there stay, dimmed, until the new one comes.
async function askRow(parameters, signal) {
  const names = catalogue.row_of_gpus;
  if (!cells.length) {
    cells = names.map((name) => rowCell(catalogue.gpus.find((g) => g.name === name)));
    $("row").replaceChildren(...cells.map((c) => c.item));
    $("row-card").hidden = false;
  }
  for (const cell of cells) cell.button.classList.add("waiting");
  markRow();
  const found = new Array(names.length).fill(0), left = names.map((_, i) => i);
  async function next() {
    while (left.length) {
      const i = left.shift(), given = new URLSearchParams(parameters);
      given.set("gpu", names[i]);
      const { ok, body } = await ask("/api/max-batch", given, signal);
      answerCell(cells[i], ok, body);
      found[i] = ok ? body.batch : 0;
    }
  }
  try {
    await Promise.all(Array.from({ length: MAX_SLOW }, next));
    drawLevels(found);
  } catch (error) {
    if (error.name !== "AbortError") for (const cell of cells) answerCell(cell, false, { error: "the server does not answer" });
  }
}

function answerCell(cell, ok, body) {
  cell.button.classList.remove("waiting");
  cell.number.className = "n";
  cell.number.textContent = ok ? body.batch.toLocaleString("en") : "–";
  cell.button.setAttribute("aria-label", ok ? `${cell.gpu.title}: largest batch ${body.batch}` : `${cell.gpu.title}: ${body.error}`);
  cell.button.title = !ok ? "" : body.batch
    ? `${body.margin_batch} with the headroom that plans keep: ${body.margin_reason}. What limits it: ${body.limited_by}` : "Not even one sample fits";
  cell.note.replaceChildren(ok ? bytes(cell.gpu.total_memory_bytes) : element("span", { class: "why", text: shorten(body.error) }));
}

function drawLevels(found) {
  const most = Math.max(...found, 1);
  cells.forEach((cell, i) => { cell.level.style.width = `${(100 * found[i]) / most}%`; });
}

const shorten = (text) => text.replace(/^[^:]*: /, "").split(";")[0];

function rowCell(gpu) {
  const number = element("span", { class: "n first", text: "asking …" });
  const note = element("span", { class: "m", text: bytes(gpu.total_memory_bytes) });
  const level = element("i");
  const button = element("button", { type: "button", "data-gpu": gpu.name, "aria-pressed": "false" },
    element("span", { class: "g", text: gpuName(gpu) }), note, number, element("span", { class: "track" }, level));
  button.addEventListener("click", () => { $("gpu").value = gpu.name; changed(); });
  return { item: element("li", {}, button), number, button, note, level, gpu };
}

function markRow() {
  for (const button of $("row").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.gpu === $("gpu").value));
}

async function askPlan(parameters, signal) {
  const place = $("plan");
  setPlanning(true);
  try {
    const { ok, body } = await ask("/api/plan", parameters, signal);
    if (!ok) place.replaceChildren(element("p", { class: "quiet", text: body.error }));
    else if (body.found) showPlan(body.found, usePlan); else showMissing(body.missing);
    setPlanning(false);
  } catch (error) {
    if (error.name === "AbortError") return;
    place.replaceChildren(element("p", { class: "quiet", text: NO_ANSWER.error }));
    setPlanning(false);
  }
}

// A plan for what was asked before stays to be read, but not to be used.
function setPlanning(busy) {
  $("planning").hidden = !busy;
  $("plan").setAttribute("aria-busy", String(busy));
  $("plan").classList.toggle("busy", busy);
  $("plan").inert = busy;
}

// Every setting of the plan, and nothing that was chosen before.
function usePlan(settings) {
  const { micro_batch, ...given } = settings;
  if (micro_batch !== Math.ceil(settings.batch / settings.accumulate)) given.micro_batch = micro_batch;
  tell(set({ ...blank(), ...given }), "The plan has");
  changed();
  $("answer").scrollIntoView({ block: "nearest" });
}

function tell(unknown, whose) {
  form.querySelector(".notice")?.remove();
  if (!unknown.length) return;
  const said = unknown.map(([name, value]) => `${name} “${value.slice(0, 60)}”`).join(", ");
  form.prepend(element("p", { class: "notice", role: "alert", text: `${whose} ${said}, which is not known here and was left out.` }));
}

function listen() {
  for (const [name, stops] of [["batch", () => catalogue.batch_stops], ["seq", seqStops]]) {
    const slider = $(`${name}-slider`);
    slider.addEventListener("input", () => {
      $(name).value = stops()[Number(slider.value)];
      if (name === "batch") $("micro_batch").value = "";
      slider.setAttribute("aria-valuetext", `${$(name).value} ${name === "batch" ? "samples" : "tokens"}`);
      changed();
    });
  }
  form.addEventListener("input", (event) => {
    if (event.target.type === "range" || event.target.id === "model") return;
    if (["batch", "accumulate"].includes(event.target.id)) $("micro_batch").value = "";
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

function chooseModel() {
  if (Number($("seq").value) > longest()) $("seq").value = longest();
  placeSliders();
  changed();
}

async function begin() {
  try {
    build((await ask("/api/catalogue", "")).body, chooseModel);
  } catch {
    refuse(NO_ANSWER);
    return;
  }
  tell(readAddress(), "The address asks for");
  listen();
  movedAt = performance.now();
  changed();
}

begin();
