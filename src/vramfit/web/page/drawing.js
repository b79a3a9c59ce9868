// What the page draws: plain elements from figures, no state of its own.

export const CATEGORIES = {
  weights: "parameters of the model",
  gradients: "one for each weight that learns",
  optimizer: "state, such as AdamW’s two moments",
  activations: "kept for the backward pass",
  temporaries: "needed for a moment, at the peak",
  workspaces: "of cuBLAS and of kernels",
  inputs: "the batch itself",
  unused: "cached or fragmented, at most",
  context: "CUDA’s own, outside of PyTorch",
};
const NAMES = { unused: "unused", context: "CUDA context" };
// The same over a step: when each of them is there, and why.
const OVER_A_STEP = {
  weights: "there all the time",
  gradients: "come in the backward pass, go after the optimizer’s step",
  optimizer: "state that stays from step to step",
  activations: "the forward pass keeps them, the backward pass frees them layer by layer; in the optimizer’s step only the loss and the model’s outputs are left, which the loop still holds",
  temporaries: "inside single operations: gradients on their way through a layer, what the optimizer computes from its state",
  workspaces: "scratch memory of cuBLAS, kept once it was needed",
  inputs: "the batch itself",
};
const WITHOUT_TRAINING = { ...OVER_A_STEP, activations: "results on their way through the layers", temporaries: "inside single operations" };
const AT_THE_OPTIMIZER = "loss and outputs of the forward pass, which the loop still holds";
const SHORT_PARTS = { forward: "fwd", backward: "bwd", optimizer: "opt" };
const FAR = 4; // the axis is cut below a limit so many times the highest point: the step would be flat
const THIN = 0.01; // of the highest point: too little to be seen

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = Math.abs(count), unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  const digits = unit === 0 ? 0 : unit <= 2 ? (size >= 100 ? 0 : 1) : 2;
  return `${count < 0 ? "−" : ""}${size.toFixed(digits)} ${units[unit]}`;
}

export function seconds(s) {
  if (s < 1) return `${Number((1000 * s).toPrecision(3))} ms`;
  return s < 120 ? `${s.toPrecision(3)} s` : `${(s / 60).toPrecision(3)} min`;
}

// Everything the GPU's memory is taken by: the categories, what the allocator holds beside them, the context.
export function partsOf(answer) {
  const parts = Object.entries(answer.breakdown).filter(([, size]) => size > 0);
  const unused = Math.max(answer.safe_reserved_bytes - answer.peak_allocated_bytes, 0);
  if (unused > 0) parts.push(["unused", unused]);
  if (answer.total_memory_bytes !== null && limitOf(answer) === answer.total_memory_bytes) {
    parts.push(["context", answer.context_bytes]);
  }
  return parts;
}

// The line: the GPU's whole memory, or the amount that was given.
export function limitOf(answer) {
  if (answer.capacity_bytes === null) return null;
  const whole = answer.capacity_bytes + answer.context_bytes;
  return whole === answer.total_memory_bytes ? whole : answer.capacity_bytes;
}

export function drawBar(bar, answer, gpuTitle) {
  const parts = partsOf(answer), limit = limitOf(answer);
  const need = parts.reduce((sum, [, size]) => sum + size, 0);
  const scale = 1.02 * Math.max(need, limit ?? 0);
  const share = (size) => `${(100 * size) / scale}%`;
  let at = 0;
  for (const name of Object.keys(CATEGORIES)) {
    const size = parts.find(([part]) => part === name)?.[1] ?? 0;
    const piece = child(bar, `part c-${name}`);
    piece.style.left = share(at);
    piece.style.width = share(size);
    piece.title = size ? `${NAMES[name] ?? name}: ${bytes(size)}` : "";
    at += size;
  }
  const over = child(bar, "over"), line = child(bar, "limit"), label = child(bar, "need");
  over.hidden = limit === null || need <= limit;
  line.hidden = limit === null;
  if (limit !== null) {
    over.style.left = share(limit);
    over.style.right = `${100 - (100 * need) / scale}%`;
    line.style.left = share(limit);
    line.classList.toggle("low", limit < 0.4 * scale);
    line.replaceChildren(element("span", { text: `${gpuTitle} ${bytes(limit)}` }));
  }
  label.textContent = `at most ${bytes(need)}`;
  label.style.left = share(need);
  label.classList.toggle("low", need < 0.3 * scale);
  const said = parts.map(([name, size]) => `${NAMES[name] ?? name} ${bytes(size)}`).join(", ");
  bar.setAttribute("aria-label", `${bytes(need)} at most${limit === null ? "" : ` of ${bytes(limit)}`}: ${said}`);
}

function child(parent, className) {
  const key = className.split(" ").pop();
  let found = parent.querySelector(`:scope > .${key}`);
  if (!found) parent.append((found = element("div", { class: className })));
  return found;
}

export function drawParts(body, answer) {
  const about = { ...CATEGORIES };
  if (answer.settings.mode === "infer") about.activations = WITHOUT_TRAINING.activations;
  else if (answer.peak_part === "optimizer") about.activations = AT_THE_OPTIMIZER;
  const parts = partsOf(answer), total = parts.reduce((sum, [, size]) => sum + size, 0);
  body.replaceChildren(...parts.map(([name, size]) => element("tr", {},
    element("th", { scope: "row" }, element("i", { class: `swatch c-${name}` }), NAMES[name] ?? name),
    element("td", { class: "wide", text: about[name] }),
    element("td", { class: "number", text: bytes(size) }),
    element("td", { class: "number", text: percent(size, total) }))));
}

export function percent(part, whole) {
  const share = whole ? (100 * part) / whole : 0;
  return share > 0 && share < 0.5 ? "<1 %" : `${Math.round(share)} %`;
}

export function drawTimeline(place, legend, answer, gpuTitle) {
  const points = answer.timeline, width = 960, height = 220;
  const top = Math.max(...points.map((p) => p.allocated_bytes), 1), capacity = answer.capacity_bytes;
  const isCut = capacity > FAR * top;
  const limit = isCut ? 1.3 * top : capacity; // where its line lies
  const scale = 1.12 * Math.max(top, limit ?? 0);
  const y = (size) => (height - (height * size) / scale).toFixed(1);
  const x = (index) => ((width * index) / points.length).toFixed(1);
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const plot = element("div", { class: "plot", "aria-hidden": "true" }, svg);
  const write = (className, text, size) => {
    const said = element("span", { class: className, text });
    said.style.top = `${(100 * (scale - size)) / scale}%`;
    plot.append(said);
  };
  const unit = 1024 ** Math.min(Math.floor(Math.log2(scale) / 10), 3);
  for (const at of [0, ...ticks((isCut ? 1.06 * top : scale) / unit)]) {
    svg.append(svgElement("line", { class: "grid-line", x1: 0, x2: width, y1: y(at * unit), y2: y(at * unit) }));
    write("tick", `${Number(at.toPrecision(3))} ${bytes(unit).split(" ")[1]}`, at * unit);
  }
  const below = points.map(() => 0);
  for (const name of Object.keys(answer.breakdown)) {
    const lower = [...below];
    points.forEach((p, i) => { below[i] += p.breakdown[name] ?? 0; });
    const there = points.map((_, i) => `${x(i)},${y(below[i])} ${x(i + 1)},${y(below[i])}`);
    const back = points.map((_, i) => `${x(i + 1)},${y(lower[i])} ${x(i)},${y(lower[i])}`).reverse();
    svg.append(svgElement("polygon", { class: `c-${name}`, points: [...there, ...back].join(" ") }));
  }
  if (limit !== null) {
    svg.append(svgElement("line", { class: "top-line", x1: 0, x2: width, y1: y(limit), y2: y(limit) }));
    write("limit-name", `${gpuTitle}: ${bytes(capacity)} may be reserved`, limit);
  }
  if (isCut) write("cut", `≈ the axis is cut here: the line is ${Math.round(capacity / top)} times as high as the step`, 1.15 * top);
  place.replaceChildren(plot, partNames(points, place.clientWidth), element("span", { class: "unseen", text: `Allocated bytes over a step, highest ${bytes(top)}; the peak comes ${answer.peak}.` }));
  drawLegend(legend, answer, top);
}

function partNames(points, width) {
  const names = element("div", { class: "names", "aria-hidden": "true" });
  for (let i = 0; i < points.length;) {
    let next = i;
    while (next < points.length && points[next].part === points[i].part) next += 1;
    const part = points[i].part, isNarrow = (width * (next - i)) / points.length < 9 * part.length;
    const name = element("span", { text: isNarrow ? SHORT_PARTS[part] ?? part : part, title: part });
    name.style.flex = `${next - i} 1 0`;
    names.append(name);
    i = next;
  }
  return names;
}

function drawLegend(legend, answer, top) {
  const about = answer.settings.mode === "train" ? OVER_A_STEP : WITHOUT_TRAINING;
  const most = (name) => Math.max(...answer.timeline.map((p) => p.breakdown[name] ?? 0));
  const there = Object.keys(answer.breakdown).filter((name) => most(name) > 0);
  const thin = there.filter((name) => most(name) < THIN * top);
  legend.replaceChildren(...there.filter((name) => !thin.includes(name)).map((name) => element("li", {},
    element("i", { class: `swatch c-${name}` }), element("b", { text: name }), ` ${about[name]}`)));
  if (thin.length) legend.append(element("li", { class: "quiet", text: `Too little to be seen: ${thin.map((name) => `${name} (${bytes(most(name))})`).join(", ")}.` }));
}

export function drawScatter(place, plan) {
  const all = [
    { settings: "this plan", step_time_s: plan.step_time_s, safe_reserved_bytes: plan.safe_reserved_bytes, mark: "chosen" },
    ...plan.alternatives.map((a) => ({ ...a, mark: a.fits ? "fits" : "not" })),
  ];
  const width = Math.max(place.clientWidth, 280), height = 230, left = 68, bottom = 36, top = 12, right = 14;
  const most = 1.08 * Math.max(plan.budget_bytes, ...all.map((a) => a.safe_reserved_bytes));
  const longest = 1.08 * Math.max(...all.map((a) => a.step_time_s));
  const x = (s) => left + ((width - left - right) * s) / longest;
  const y = (n) => height - bottom - ((height - bottom - top) * n) / most;
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Memory against time of the alternatives" });
  const axis = { stroke: "var(--line)", "stroke-width": 1 };
  svg.append(svgElement("path", { d: `M${left} ${top}V${height - bottom}H${width - right}`, fill: "none", ...axis }));
  svg.append(svgElement("line", { x1: left, x2: width - right, y1: y(plan.budget_bytes), y2: y(plan.budget_bytes), stroke: "var(--ink)", "stroke-dasharray": "6 4", "stroke-width": 1.5 }));
  const label = (text, at) => { const made = svgElement("text", at); made.textContent = text; svg.append(made); };
  label(bytes(plan.budget_bytes), { x: left - 6, y: y(plan.budget_bytes) + 4, "text-anchor": "end" });
  label("0", { x: left - 6, y: height - bottom, "text-anchor": "end" });
  label("time of a step →", { x: width - right, y: height - 4, "text-anchor": "end" });
  for (const at of ticks(longest)) label(seconds(at), { x: x(at), y: height - bottom + 15, "text-anchor": "middle" });
  const looks = { chosen: ["var(--good)", 8, "var(--good)"], fits: ["var(--card)", 5.5, "var(--accent)"], not: ["var(--card)", 5.5, "var(--bad)"] };
  for (const a of all.reverse()) {
    const [fill, r, stroke] = looks[a.mark];
    const dot = svgElement("circle", { cx: x(a.step_time_s), cy: y(a.safe_reserved_bytes), r, fill, stroke, "stroke-width": 2.5 });
    const title = svgElement("title", {});
    title.textContent = `${a.settings}: ${bytes(a.safe_reserved_bytes)}, ${seconds(a.step_time_s)}${a.why_not ? `; not taken: ${a.why_not}` : ""}`;
    dot.append(title);
    svg.append(dot);
  }
  const key = [["chosen", "this plan"], ["fits", "fits"], ["not", "does not fit"]].filter(([mark]) => all.some((a) => a.mark === mark));
  place.replaceChildren(svg, element("p", { class: "key" }, ...key.map(([mark, text]) => element("span", { class: mark, text }))));
}

// Round figures from above zero up to a length, three to six of them.
function ticks(length) {
  const power = 10 ** Math.floor(Math.log10(length));
  const step = [0.2, 0.5, 1, 2].map((n) => n * power).find((n) => length / n <= 6);
  return Array.from({ length: Math.floor(length / step) }, (_, i) => (i + 1) * step);
}

function svgElement(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
