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
      Plotly.react(name, coloured(data, css), coloured(whole, css), { displaylogo: false, responsive: true, displayModeBar: false });
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
