// Figures in the colours of the page, drawn again when those change.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const style = () => getComputedStyle(document.documentElement);
  const coloured = (value, css) => {
    if (typeof value === "string") return value.startsWith("@") ? css.getPropertyValue(`--${value.slice(1)}`).trim() : value;
    if (Array.isArray(value)) return value.map((v) => coloured(v, css));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, css)]));
    return value;
  };
  // Of modules, in the part that is looked at: those that can be named, and what they are inside of.
  const PX_OF_LETTER = 7.5, MARGIN_PX = 8;
  const levels = {};
  const readable = (name, data, width) => data.map((trace) => {
    if (trace.type !== "icicle") return trace;
    const level = levels[name] ?? trace.ids[0], whole = trace.values[trace.ids.indexOf(level)], kept = new Set([trace.ids[0]]);
    trace.ids.map((id, i) => i).reverse().forEach((i) => { // what is inside comes after
      const px = PX_OF_LETTER * Math.max(trace.labels[i].length, trace.text[i].length) + MARGIN_PX;
      if ((width * trace.values[i]) / whole >= px || kept.has(trace.ids[i])) kept.add(trace.ids[i]).add(trace.parents[i]);
    });
    const pick = (list) => list.filter((_, i) => kept.has(trace.ids[i]));
    return { ...trace, level, ids: pick(trace.ids), labels: pick(trace.labels), parents: pick(trace.parents), values: pick(trace.values),
      text: pick(trace.text), marker: { ...trace.marker, colors: pick(trace.marker.colors) } };
  });
  const SHORT = { forward: "fwd", backward: "bwd", optimizer: "opt" };
  const draw = () => {
    const css = style(), isNarrow = innerWidth < 600;
    const axis = { gridcolor: "@line", linecolor: "@line", zerolinecolor: "@line", automargin: true };
    for (const [name, { data, layout }] of Object.entries(figures)) {
      const whole = {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, dragmode: false,
        font: { family: "system-ui, sans-serif", color: "@ink", size: isNarrow ? 11 : 13 },
        margin: { l: isNarrow ? 44 : 60, r: 12, t: 24, b: 48 },
        hoverlabel: { bgcolor: "@card", bordercolor: "@line", font: { color: "@ink" } },
        ...layout, annotations: (layout.annotations ?? []).map((a) => (isNarrow ? { ...a, text: SHORT[a.text] ?? a.text, font: { size: 10 } } : a)), xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
      };
      const place = document.getElementById(name), isFirst = !place.data;
      Plotly.react(name, coloured(readable(name, data, place.clientWidth), css), coloured(whole, css), { displaylogo: false, responsive: true, displayModeBar: false });
      if (isFirst && data[0].type === "icicle") place.on("plotly_icicleclick", (event) => { levels[name] = event.nextLevel; draw(); return false; });
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
