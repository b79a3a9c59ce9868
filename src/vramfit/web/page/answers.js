// Answers shown: the verdict and what is below it, refusals, plans.

import { bytes, drawBar, drawParts, drawScatter, drawTimeline, element, seconds } from "/drawing.js";
import { $, form, gpuEntry } from "/state.js";

const SPOKEN_AFTER_MS = 600, MIN_ALTERNATIVES = 2; // fewer dots are no picture
let spokenTimer;

export const gpuName = (gpu) => gpu.title.replace(/^NVIDIA (GeForce )?/, "");
const MARKS = { good: "✓", tight: "!", bad: "✗", open: "·" };

// Until the answer is there: what stood there before, dimmed; at first, words.
export function wait(values) {
  document.body.classList.add("asking");
  if (!document.body.classList.contains("empty")) return;
  $("answer").dataset.tone = "wait";
  $("asked").textContent = `${values.model} · ${values.mode} · batch ${values.batch} × ${values.seq} tokens`;
  $("mark").textContent = "";
  $("headline-text").textContent = "Predicting what it takes …";
  $("details").replaceChildren(element("p", { text: "The first prediction of a model takes a second or two." }));
}

export function show(answer, values) {
  const gpu = gpuEntry(), card = $("answer");
  card.dataset.tone = answer.tone;
  document.body.classList.remove("stale", "empty");
  $("asked").textContent = sentence(answer);
  $("mark").textContent = MARKS[answer.tone];
  $("headline-text").textContent = answer.headline;
  $("details").replaceChildren(...answer.details.map((text) => element("p", { text })));
  drawBar($("bar"), answer, gpu ? gpuName(gpu) : "memory");
  drawParts($("parts").tBodies[0], answer);
  $("step-title").textContent = values.mode === "train" ? "One step, from left to right" : "One batch, from left to right";
  $("step-about").textContent = `Allocated memory ${values.mode === "train" ? "over a step" : "over a batch"}. To the right goes the order of requests for memory, not time.`;
  drawTimeline($("timeline"), $("legend"), answer, gpu ? gpuName(gpu) : "");
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
  unmark();
  document.title = `${MARKS[answer.tone]} ${answer.headline} · vramfit`;
  speak(`${answer.headline}. ${answer.details[0] ?? ""}`);
}

function sentence(answer) {
  const { model, mode, batch, seq, precision, attention, task, gpu, micro_batch, accumulate, ...extra } = answer.settings;
  const passes = accumulate > 1 ? `${accumulate} passes of ${micro_batch}` : "";
  const others = Object.entries(extra).map(([name, value]) => (value === true ? name : name === "optimizer" ? value : `${name} ${value}`));
  return [model, mode, `batch ${batch} × ${seq} tokens`, passes, precision, attention, ...others].filter(Boolean).join(" · ");
}

function unmark() {
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
}

const capital = (text) => (text.split(" ")[0].includes("-") ? text : text.charAt(0).toUpperCase() + text.slice(1));
const stop = (text) => (/[.!?…]$/.test(text) ? text : `${text}.`);

export function refuse(problem) {
  const card = $("answer"), reasons = problem.problems.length ? problem.problems : [problem.error];
  card.dataset.tone = "refused";
  document.body.classList.add("stale");
  $("mark").textContent = "✗";
  $("headline-text").textContent = "Not possible";
  const said = (text) => stop($(text.split(/[ :]/)[0]) ? text : capital(text)); // a keyword stays as it is
  $("asked").textContent = "";
  $("details").replaceChildren(...reasons.map((text) => element("p", { text: said(text) })));
  if (problem.hint && !problem.hint.startsWith("/docs")) $("details").append(element("p", { text: stop(capital(problem.hint)) }));
  unmark();
  for (const reason of reasons) {
    const control = $(reason.split(/[ :]/)[0]);
    if (!control || !form.contains(control)) continue;
    control.setAttribute("aria-invalid", "true");
    const folded = control.closest("details");
    if (folded) folded.open = true;
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

export function showPlan(plan, onUse) {
  const use = element("button", { type: "button", class: "main", text: "Use these settings" });
  use.addEventListener("click", () => onUse(plan.settings));
  const rows = plan.reasons.map((r) => element("tr", {},
    element("th", { scope: "row", text: r.setting }),
    element("td", {}, element("span", { class: `kind ${r.kind.split(" ")[0]}`, text: r.kind_in_words })),
    element("td", { text: `${stop(capital(r.why))}${r.cost ? ` Costs in quality: ${r.cost}.` : ""}` })));
  const scatter = element("div", { class: "scatter" });
  const others = element("details", { open: true }, element("summary", { text: "What else was possible: memory against time" }), scatter);
  const isPlotted = plan.alternatives.length >= MIN_ALTERNATIVES;
  const inWords = isPlotted ? [] : plan.alternatives.map((a) => element("p", { class: "quiet", text: otherInWords(a) }));
  $("plan").replaceChildren(
    element("div", { class: "plan-head" }, element("p", { text: `${plan.headline}; about ${seconds(plan.step_time_s)} a step.` }), use),
    element("p", { class: "quiet", text: `${bytes(plan.safe_reserved_bytes)} of ${bytes(plan.budget_bytes)}, at most ${bytes(plan.most_reserved_bytes)} with any lengths. ${stop(capital(plan.margin_reason))}` }),
    element("table", { class: "plan-table" }, element("thead", {}, element("tr", {}, ...["Setting", "Class", "Why"].map((t) => element("th", { scope: "col", text: t })))),
      element("tbody", {}, ...rows)),
    ...(isPlotted ? [others] : inWords),
    element("h3", { text: "To run it" }), command(plan.commands.plan, "the command that saves the plan"),
    ...(plan.commands.train ? [command(plan.commands.train, "the command that trains by it")] : []));
  if (isPlotted) drawScatter(scatter, plan);
}

function otherInWords(a) {
  const kind = a.fits ? (a.allowed ? "fits too" : "would fit, but is not allowed above") : "does not fit";
  return `Also tried: ${a.settings}, in passes of ${a.micro_batch}, ${bytes(a.safe_reserved_bytes)} and about ${seconds(a.step_time_s)} a step: ${kind}.`;
}

export function showMissing(missing) {
  $("plan").replaceChildren(
    element("div", { class: "plan-head" }, element("p", { text: `✗ No plan fits: ${bytes(missing.shortfall_bytes)} too little` })),
    element("p", { text: stop(missing.error) }),
    ...(missing.hint ? [element("p", { class: "quiet", text: `What would do: ${missing.hint}.` })] : []));
}
