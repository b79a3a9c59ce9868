// The state of the controls: built from the catalogue, kept in the address, read back from it.

import { bytes, element } from "/drawing.js";

const LOCAL = "(a folder or hub id)";
const LABELS = {
  task: { "sequence-classification": "Sequence classification", "token-classification": "Token classification",
    "question-answering": "Question answering", "masked-lm": "Masked language model", pretraining: "Pretraining", features: "Features only" },
  mask: { padded: "padded: hides padding", ones: "given, hides nothing", none: "none given" },
  attention: { "": "model’s own", sdpa: "sdpa", eager: "eager", packed: "packed: no padding" },
  freeze: { "": "nothing", embeddings: "embeddings", encoder: "encoder", backbone: "backbone" },
  lora: { "": "none", 4: "4", 8: "8", 16: "16", 32: "32", 64: "64" },
};
export const $ = (id) => document.getElementById(id);
export const form = $("job");
export let catalogue;

function fill(select, values, labels = {}) {
  select.replaceChildren(...values.map((v) => element("option", { value: v, text: labels[v] ?? v })));
}

export function build(found) {
  catalogue = found;
  const { models, gpus, choices, defaults } = catalogue;
  const families = groupBy(models, (m) => m.family);
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
export const gpuEntry = () => catalogue.gpus.find((g) => g.name === $("gpu").value);
export const longest = () => modelEntry()?.max_positions ?? catalogue.max_seq;

export function seqStops() {
  const most = Math.min(longest(), catalogue.max_seq);
  const stops = catalogue.seq_stops.filter((n) => n <= most);
  return stops.at(-1) === most || most > catalogue.seq_stops.at(-1) ? stops : [...stops, most];
}

// The controls as they stand: name → value; what is not given has none.
export function state() {
  const mode = form.elements.mode.value;
  const found = { model: $("model").value === LOCAL ? $("local").value.trim() : $("model").value, mode };
  for (const name of ["task", "gpu", "precision", "optimizer", "attention", "freeze", "lora", "mask"]) found[name] = $(name).value;
  for (const name of ["batch", "seq", "accumulate"]) found[name] = $(name).value.trim();
  for (const name of ["checkpointing", "quantize", "allocator", "casts", "loop"]) found[name] = $(name).checked ? $(name).value : "";
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
export function set(values) {
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

export function placeSliders() {
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

export function query(values, without = []) {
  const given = Object.entries(values).filter(([name, value]) => value !== "" && !without.includes(name));
  return new URLSearchParams(given.filter(([name, value]) => String(catalogue.defaults[name] ?? "") !== value));
}

export const allowed = () => [...$("allow").querySelectorAll(":checked")].map((box) => box.value).join(",");

export function keepInAddress(values) {
  const kept = query(values);
  if (allowed()) kept.set("allow", allowed());
  const text = kept.toString();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}

export function readAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.search));
  for (const box of $("allow").querySelectorAll("input")) box.checked = (given.allow ?? "").split(",").includes(box.value);
  delete given.allow;
  const empty = Object.fromEntries(["attention", "freeze", "lora", "checkpointing", "quantize", "allocator", "casts", "loop"].map((n) => [n, ""]));
  return set({ ...empty, ...catalogue.defaults, ...given });
}
