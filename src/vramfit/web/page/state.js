// The state of the controls: built from the catalogue, kept in the address, read back from it.

import { combobox } from "/combobox.js";
import { bytes, element } from "/drawing.js";

const LAYERS = { freeze: (n) => `${n} lowest layers`, checkpointing: (n) => `first ${n} layers`, lora: (n) => n };
const MODES = { train: "forward, backward and the optimizer’s step", forward: "forward alone, keeping what backward would need", infer: "forward alone, nothing kept" };
export const $ = (id) => document.getElementById(id);
export const form = $("job");
export let catalogue;
let model;

// A choice that may be left open has "" among its labels; it comes first.
function fill(select, values, labels = {}) {
  const all = [...new Set([...("" in labels ? [""] : []), ...values])];
  select.replaceChildren(...all.map((v) => element("option", { value: v, text: labels[v] ?? v })));
}

// The control of a setting that the page does not have by itself: a choice, a switch or a number.
function control({ keyword: id, label, about, values, labels, modes, is_basic: isBasic, hidden }) {
  const box = (kind, ...inside) => element(kind, { "data-modes": modes.join(" ") }, ...inside);
  if (hidden) return box("span", element("input", { type: "hidden", id, name: id, "aria-label": label })); // a plan may have it, an address too
  const isChoice = values.length || Object.keys(labels).length > 0;
  if (values.length === 2 && !("" in labels) || !isChoice && catalogue.defaults[id] === false) {
    const made = box("label", element("input", { type: "checkbox", role: "switch", id, name: id, value: values[1] ?? "true" }), element("span", { text: label }, element("small", { text: about })));
    made.className = "switch";
    return made;
  }
  const input = isChoice ? element("select", { id, name: id }) : element("input", { id, name: id, type: "number", min: "1", step: id === "max_grad_norm" ? "any" : "1", inputmode: "numeric" });
  if (isBasic) input.title = about;
  const made = box("div", element("label", { for: id, text: label }), input, ...(isBasic ? [] : [element("small", { text: about })]));
  made.className = "field";
  return made;
}

const controls = () => [...form.elements].filter((control) => control.name && control.type !== "radio");

export function build(found, onModel) {
  catalogue = found;
  const { models, gpus, choices, defaults } = catalogue;
  model = combobox($("model"), $("models"), {
    options: models.map((m) => ({ value: m.name, note: `${millions(m.num_parameters)} · ${m.family}`, words: `${m.name} ${m.family}`.toLowerCase() })),
    none: (text) => (catalogue.allow_local ? `Not in the catalogue. Enter takes “${text}” as a folder or hub id.`
      : `No model of the catalogue has “${text}” in its name. Folders and hub ids: start vramfit web with --allow-local.`),
    onCommit: onModel,
  });
  const kinds = groupBy(gpus, (g) => g.kind);
  $("gpu").replaceChildren(...[...kinds].map(([kind, inside]) => element("optgroup", { label: kind.replace("-", " ") },
    ...inside.map((g) => element("option", { value: g.name, text: `${g.title.replace(/^NVIDIA /, "")}, ${bytes(g.total_memory_bytes)}` })))));
  for (const setting of catalogue.settings) {
    if (!$(setting.keyword)) (setting.hidden ? form : $(setting.is_basic ? "basic" : "more")).append(control(setting));
    if ($(setting.keyword).tagName === "SELECT" && setting.keyword !== "gpu") fill($(setting.keyword), [...setting.values, ...Object.keys(setting.labels)], setting.labels);
  }
  $("batch").max = catalogue.max_batch;
  $("accumulate").max = catalogue.max_batch;
  $("allow").replaceChildren(...choices.allow.map((name) => element("label", {}, element("input", { type: "checkbox", name: "allow", value: name }), element("span", { text: name }, element("small", { text: catalogue.allowable[name] })))));
  $("about").textContent = `vramfit ${catalogue.version}, torch ${catalogue.torch_version}. Predicted here, on this machine; nothing is sent anywhere else.`;
  set(defaults);
  document.body.classList.remove("loading");
}

function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) groups.set(key(item), [...(groups.get(key(item)) ?? []), item]);
  return groups;
}

const millions = (n) => (n < 1e9 ? `${Math.round(n / 1e6)} M` : `${(n / 1e9).toFixed(1)} B`);
const modelEntry = () => catalogue.models.find((m) => m.name === model.value);
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
  const found = { mode };
  for (const box of form.querySelectorAll("[data-modes]")) {
    const off = !box.dataset.modes.split(" ").includes(mode);
    box.classList.toggle("off", off);
    box.querySelector("select, input").disabled = off;
  }
  for (const control of controls()) {
    const given = control.type !== "checkbox" || control.checked;
    found[control.name] = given && !control.disabled ? control.value.trim() : "";
  }
  return { ...found, model: model.value }; // not what is being typed
}

// Every control at its default.
export const blank = () => ({ ...Object.fromEntries(controls().map((control) => [control.name, ""])), ...catalogue.defaults });

// Put values into the controls; those that no control can show are named.
export function set(values) {
  const unknown = [];
  for (const [name, raw] of Object.entries(values)) {
    const value = String(raw), control = $(name);
    if (name === "mode") {
      const radio = [...form.elements.mode].find((r) => r.value === value);
      if (radio) radio.checked = true; else unknown.push([name, value]);
    } else if (name === "model") {
      if (catalogue.allow_local || catalogue.models.some((m) => m.name === value)) model.set(value); else unknown.push([name, value]);
    } else if (!control || !["SELECT", "INPUT"].includes(control.tagName)) {
      unknown.push([name, value]);
    } else if (control.type === "checkbox") {
      control.checked = value === control.value;
      if (value && !control.checked && value !== String(catalogue.defaults[name] ?? "")) unknown.push([name, value]);
    } else if (control.tagName === "SELECT" && ![...control.options].some((o) => o.value === value)) {
      const isLayers = name in LAYERS && /^[1-9][0-9]{0,3}$/.test(value);
      if (isLayers || catalogue.choices[name]?.includes(value)) { // or a value that is not offered
        control.append(element("option", { value, text: isLayers ? LAYERS[name](value) : value }));
        control.value = value;
      } else unknown.push([name, value]);
    } else control.value = value;
  }
  placeSliders();
  return unknown;
}

// What follows from the controls: the sliders, and the words beside what was chosen.
export function placeSliders() {
  const entry = modelEntry(), advanced = [...$("advanced").querySelectorAll("select, input")];
  $("model-about").textContent = entry ? `${millions(entry.num_parameters)} parameters, ${entry.num_layers} layers` : "";
  $("mode-about").textContent = MODES[form.elements.mode.value];
  const changed = advanced.filter((c) => (c.type === "checkbox" ? c.checked : c.value !== String(catalogue.defaults[c.name] ?? "")));
  $("advanced-set").textContent = changed.length ? `${changed.length} set: ${changed.map((c) => (c.value === "true" ? c.name : `${c.name} ${c.value}`)).join(", ")}` : "attention, quantization, host memory, kernels";
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

// What was chosen as parameters of one path of the API; what it does not take is left out.
export function query(path, values, without = []) {
  const takes = catalogue.parameters[path].filter((name) => !without.includes(name));
  const given = Object.entries(values).filter(([name, value]) => value !== "" && takes.includes(name));
  return new URLSearchParams(given.filter(([name, value]) => String(catalogue.defaults[name] ?? "") !== value));
}

export const allowed = () => [...$("allow").querySelectorAll(":checked")].map((box) => box.value).join(",");

export function keepInAddress(values) {
  const kept = query("/api/estimate", values);
  if (allowed()) kept.set("allow", allowed());
  const text = kept.toString();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}

export function readAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.search));
  for (const box of $("allow").querySelectorAll("input")) box.checked = (given.allow ?? "").split(",").includes(box.value);
  delete given.allow;
  return set({ ...blank(), ...given });
}
