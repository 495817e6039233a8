// Charts by Vega-Lite: colours that the colour-blind tell apart (Okabe and Ito), and dashes and shapes besides.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1b1f24", "#8a7a00"];
const DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]];
const SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"];
const FONT = 'system-ui, "Segoe UI", Roboto, sans-serif';
const CONFIG = {
  font: FONT, background: "transparent", view: { stroke: "#d5dae0" },
  axis: { labelFontSize: 12, titleFontSize: 12.5, titleFontWeight: 500, gridColor: "#e8ebee", domainColor: "#aab3bd",
    tickColor: "#aab3bd", labelColor: "#57606a", titleColor: "#1b1f24", titlePadding: 8, labelFlush: false },
  legend: { labelFontSize: 12, titleFontSize: 12, labelLimit: 900, symbolSize: 70, rowPadding: 3, orient: "bottom",
    direction: "vertical", offset: 12 },
  point: { filled: true, size: 45 }, line: { strokeWidth: 1.8 },
};

function chart(spec, description) {
  const place = el("div", { class: "chart", role: "group", "aria-label": description }); // with a menu
  const drawn = spec.layer?.filter((layer) => layer && (!layer.data
    || layer.data.values.length)); // none without data
  const whole = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", description, width: "container",
    height: 340,
    config: CONFIG, autosize: { type: "fit-x", contains: "padding" }, ...spec, ...(drawn && { layer: drawn }) };
  const actions = { export: true, source: false, compiled: false, editor: false };
  requestAnimationFrame(() => { // once it is on the page and has a width
    if (!place.isConnected) return;
    vegaEmbed(place, whole, { renderer: "svg", actions, tooltip: { theme: "light" } })
      .then((made) => { place.dataset.drawn = "yes"; place.view = made.view; })
      .catch((error) => { console.error(error); place.textContent = `This chart cannot be drawn: ${error.message}`; });
  });
  return place;
}

const looksOf = (names, title = null) => ({
  color: { field: "name", type: "nominal", title, sort: names,
    scale: { domain: names, range: names.map((_, i) => COLOURS[i % 8]) },
    legend: { columns: names.some((name) => name.length > 60) ? 1 : 2, symbolOpacity: 1 } },
  dash: { field: "name", type: "nominal", title, sort: names,
    scale: { domain: names, range: names.map((_, i) => DASHES[Math.floor(i / 8) % 4]) } },
  shape: { field: "name", type: "nominal", title, sort: names,
    scale: { domain: names, range: names.map((_, i) => SHAPES[i % 6]) } },
});
// Vega-Lite reads dots and brackets in a field's name as paths; our fields have none.
const axis = (field, title, log, more = {}) => ({ field, type: "quantitative", title,
  scale: log ? { type: "log", nice: false, padding: 14 } : { type: "linear", zero: false, padding: 14 },
    axis: { format: log ? "~g" : undefined, ...more } });
const tips = (fields) => Object.entries(fields).map(([field, title]) => ({ field, title }));
