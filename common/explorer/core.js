// State lives in the URL's fragment, so that a link shows the same thing; a view draws itself anew from it.
const DATA = JSON.parse(document.getElementById("data").textContent);
const ABOUT = JSON.parse(document.getElementById("about").textContent);
const TITLES = { scoreboard: "Scoreboard", compare: "Compare", curves: "Curves", gap: "Law of the gap",
  rates: "Rates",
  topology: "Topology", planner: "Planner" };
if (ABOUT.live) TITLES.live = "Live";
const VIEWS = {}; // by name: functions of the state that return nodes
const RELOAD_S = 30;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

const state = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const link = (to) => `#${new URLSearchParams(Object.entries(to).filter(([, value]) => value != null && value !== ""))}`;
const go = (changes) => { location.hash = link({ ...state(), ...changes }); };

// Numbers and tables

const isNumber = (value) => typeof value === "number";
function show(value, digits = 4) {
  if (value == null) return "";
  if (!isNumber(value)) return String(value);
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(digits - 2);
  return String(Number(value.toPrecision(Math.max(digits, Math.floor(Math.log10(Math.abs(value) || 1)) + 1))));
}
const signed = (value, digits = 3) => (value > 0 ? "+" : value < 0 ? "−" : "") + show(Math.abs(value), digits);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const spread = (values) => { // sample standard deviation
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
};

function table(head, lines, caption, attributes = () => ({})) {
  const cell = (value, first) => value instanceof Node ? el(first ? "th" : "td", { scope: first && "row" }, value)
    : first ? el("th", { scope: "row" }, show(value)) : el("td", { class: isNumber(value) && "n" }, show(value));
  const numeric = head.map((_, place) => place > 0 && lines.some((line) => isNumber(line[place])));
  return el("div", { class: "table" }, el("table", {}, caption ? el("caption", {}, caption) : null,
    el("tr", {}, head.map((name, place) => el("th", { scope: "col", class: numeric[place] && "n" }, name))),
    lines.map((line) => el("tr", attributes(line), line.map((value, place) => cell(value, !place))))));
}

// Controls; each sets one key of the state

const controls = (...nodes) => el("div", { class: "controls" }, nodes);
const choice = (label, key, options, value, others = {}) => el("label", {}, label,
  el("select", { id: `set-${key}`, onchange: (event) => go({ ...others, [key]: event.target.value }) },
    options.map(([name, text]) => el("option", { value: name, selected: name === value }, text ?? name))));
const tick = (label, key, on) => el("label", { class: "check" }, el("input", { type: "checkbox", id: `set-${key}`,
  checked: on, onchange: (event) => go({ [key]: event.target.checked ? 1 : 0 }) }), label);
const radios = (legend, key, options, value, others = {}) => el("fieldset", {}, el("legend", {}, legend),
  el("div", {}, options.map(([name, text]) => el("label", {},
    el("input", { type: "radio", name: key, checked: name === value,
    id: `set-${key}-${name}`, onchange: () => go({ ...others, [key]: name }) }), text))));
function slider(label, key, steps, value, text) {
  const shown = el("output", {}, text(value));
  const place = steps.reduce((best, step, i) => Math.abs(step - value) < Math.abs(steps[best] - value) ? i : best, 0);
  return el("label", {}, el("span", {}, `${label}: `, shown), el("input", { type: "range", id: `set-${key}`, min: 0,
    max: steps.length - 1, value: place, "aria-valuetext": text(value),
    oninput: (event) => { shown.textContent = text(steps[event.target.value]); },
    onchange: (event) => go({ [key]: steps[event.target.value] }) }));
}
function rowsOf(options, chosen, key) { // several of many
  const toggle = (id, on) => go({ [key]: options.map(([name]) => name)
    .filter((name) => (name === id ? on : chosen.includes(name))).join(",") || "-" });
  return el("fieldset", {}, el("legend", {}, `Rows (${chosen.length} of ${options.length})`),
    el("div", { class: "rows" }, options.map(([id, name]) => el("label", {}, el("input", { type: "checkbox",
      id: `row-${id}`, checked: chosen.includes(id), onchange: (event) => toggle(id, event.target.checked) }),
        name))));
}

// Search

function rowsFound(words) {
  const found = [];
  DATA.claims.forEach((claim, place) => found.push([claim.claim, "claim", { view: "scoreboard", claim: place }]));
  for (const [name, of] of Object.entries(DATA.tables)) {
    for (const row of of.rows) {
      found.push([row.name, `${name}: ${of.title} ${row.id}`, { view: "curves", table: name, rows: row.id }]);
    }
  }
  return found.filter(([text, more]) => words.every((word) => `${text} ${more}`.toLowerCase().includes(word)));
}
function search(event) {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = document.getElementById("hits"), found = words.length ? rowsFound(words) : [];
  hits.hidden = !words.length;
  hits.replaceChildren(...found.slice(0, 40).map(([text, more, to]) => el("li", {}, el("a", { href: link(to),
    onclick: () => { hits.hidden = true; } }, text, " ", el("small", {}, more.split(":")[0])))),
  el("li", {}, el("small", {}, found.length > 40 ? `and ${found.length - 40} more` : found.length ? "" : "no match")));
}

// Drawing

function draw() {
  const now = state(), name = Object.hasOwn(TITLES, now.view) ? now.view : "scoreboard";
  const focus = document.activeElement?.id;
  for (const section of document.querySelectorAll("section")) section.classList.toggle("shown", section.id === name);
  document.getElementById("views").replaceChildren(...Object.entries(TITLES).map(([view, title]) =>
    el("a", { href: link({ view }), "aria-current": view === name && "page" }, title)));
  document.title = `${TITLES[name]}: decentralized training`;
  const panel = document.querySelector(`#${name} .panel`), scroll = document.querySelector(".shown .rows")?.scrollTop;
  panel.replaceChildren(...[VIEWS[name](now)].flat().filter(Boolean));
  if (scroll) (panel.querySelector(".rows") ?? {}).scrollTop = scroll;
  if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
  document.body.dataset.shows = location.hash; // for tests: which state this is
}

function start() {
  document.documentElement.classList.add("scripted");
  document.getElementById("search").addEventListener("input", search);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.getElementById("hits").hidden = true;
    if (event.key === "/" && !/INPUT|SELECT/.test(event.target.tagName)) {
      event.preventDefault();
      document.getElementById("search").focus();
    }
  });
  window.addEventListener("hashchange", draw);
  document.querySelectorAll("#claims tr[data-claim]").forEach((row) => {
    const name = row.querySelector("th"), to = link({ view: "scoreboard", claim: row.dataset.claim });
    name.replaceChildren(el("a", { href: to }, name.textContent));
  });
  draw();
  if (ABOUT.live) setTimeout(() => location.reload(), 1000 * RELOAD_S);
}
