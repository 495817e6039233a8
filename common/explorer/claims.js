// Views of what is concluded: the scoreboard with its evidence, and two rows compared seed by seed.


VIEWS.scoreboard = ({ claim }) => {
  document.querySelectorAll("#claims tr[data-claim]").forEach((row) =>
    row.classList.toggle("chosen", row.dataset.claim === claim));
  const shown = DATA.claims[Number.parseInt(claim, 10)];
  return shown ? evidence(shown) : null;
};

function evidence(claim) {
  const numbers = claim.tests.map((test) => ({ ...test, low: isNumber(test.low) ? test.low : test.value,
    high: isNumber(test.high) ? test.high : test.value }));
  const [least, most] = claim.rule?.limits ?? [];
  const ends = { least: isNumber(least) ? least : null, most: isNumber(most) ? most : null };
  const sort = numbers.map((test) => test.label), y = { field: "label", type: "nominal", title: null, sort,
    axis: { labelLimit: 260 } };
  const limits = Object.values(ends).filter((value) => value != null).map((limit) => ({ limit }));
  const tooltip = tips({ label: "number", value: "value", low: "low", high: "high", record: "record" });
  const x = { title: claim.what, scale: { zero: false } };
  const drawing = numbers.length && chart({ height: 34 * numbers.length + 20, layer: [
    { data: { values: limits }, mark: { type: "rule", strokeDash: [5, 3], color: "#57606a" },
      encoding: { x: { field: "limit", type: "quantitative", ...x } } },
    { data: { values: numbers }, mark: { type: "rule", strokeWidth: 2.5, color: COLOURS[0] },
      encoding: { y, x: { field: "low", type: "quantitative", ...x }, x2: { field: "high" } } },
    { data: { values: numbers }, mark: { type: "point", size: 80, color: COLOURS[0] },
      encoding: { y, x: { field: "value", type: "quantitative", ...x }, tooltip } }] },
  `${claim.what}: each number with its interval; dashed: the rule, ${claim.rule?.text}`);
  const lines = claim.tests.map((test) => [test.label, test.value, test.low, test.high, source(test)]);
  const records = [...new Set(claim.tests.filter((test) => test.compare === undefined).map((test) => test.record))];
  const shown = el("article", { class: "evidence", id: "evidence", tabindex: -1, "aria-label": "Evidence" },
    el("h3", {}, claim.claim, " ", el("span", { class: claim.verdict }, claim.verdict)),
    el("p", { class: "note" }, `Paper: ${claim.paper}. Here: ${[claim.here, claim.regime].filter(Boolean).join("; ")}.`),
    drawing || null,
    lines.length ? table(["number", "value", "low", "high", "source"], lines) : null,
    records.map((name) => el("details", { open: records.length === 1 && DATA.records[name].length < 40 },
      el("summary", {}, `Record ${name}`), table(DATA.records[name][0], DATA.records[name].slice(1)))));
  requestAnimationFrame(() => shown.focus()); // also scrolls there
  return shown;
}

function source(test) {
  const page = el("a", { href: `${ABOUT.results}/${test.page}` }, `page of ${test.record}`);
  if (!test.compare || !DATA.tables[test.compare.table]) return el("span", {}, page,
    el("small", {}, ` (${test.row})`));
  return el("span", {}, el("a", { href: link({ view: "compare", mode: "any", ...test.compare }) }, "seed by seed"),
    ", ", page);
}

// Compare

const ROUNDING = 2e-5; // by how much differences of numbers with six digits may differ, relative to the numbers
const MODES = [["tuned", "each tuned"], ["same", "same hyperparameters"], ["given", "set by hand, different"]];

function tableOf(name) { // of a table's runs, or of the trials of its sweep
  if (!name.startsWith("trials:")) return DATA.tables[name];
  const sweep = DATA.sweeps[name.slice(7)], rows = [], runs = [];
  for (const [method, place, seed, value] of sweep.trials) {
    const point = sweep.points[place];
    const at = Object.entries(point).map(([key, of]) => `${key.split(".").pop()} ${show(of)}`).join(", ");
    const id = `${sweep.methods[method].id}@${at}`;
    let row = rows.findIndex((one) => one.id === id);
    if (row < 0) {
      row = rows.push({ id, name: `${sweep.methods[method].name} at ${at}`, settings: [point], tuned: false }) - 1;
    }
    runs.push({ row, variant: 0, seed, values: [value] });
  }
  return { title: `Trials of ${name.slice(7)}`, variants: [""], quantities: [sweep.quantity], metric: sweep.quantity,
    rows, runs };
}

function differing(a, b, variant) {
  const [one, other] = [a.settings[variant] ?? {}, b.settings[variant] ?? {}];
  return [...new Set([...Object.keys(one), ...Object.keys(other)])]
    .filter((key) => JSON.stringify(one[key]) !== JSON.stringify(other[key]));
}
function modesOf(a, b, variant) {
  const same = !differing(a, b, variant).length;
  return [a.tuned && b.tuned && "tuned", same && "same", !same && !(a.tuned && b.tuned) && "given"].filter(Boolean);
}

function hasEqual(of) { // whether two rows have the same hyperparameters
  return of.variants.some((_, variant) => {
    const settings = of.rows.map((row) => JSON.stringify(Object.entries(row.settings[variant] ?? {}).sort()));
    return new Set(settings).size < settings.length;
  });
}

function valuesOf(of, row, variant, quantity) {
  const place = of.quantities.indexOf(quantity);
  return Object.fromEntries(of.runs.filter((run) => run.row === row && run.variant === variant)
    .map((run) => [run.seed, run.values[place]]));
}

function compared(of, variant, quantity, a, b) { // seed by seed, with mean and interval if all seeds have numbers
  const [one, other] = [a, b].map((row) => valuesOf(of, of.rows.indexOf(row), variant, quantity));
  const lines = Object.keys(one).filter((seed) => seed in other)
    .map((seed) => ({ seed, a: one[seed], b: other[seed], difference: one[seed] - other[seed] }));
  const has = (values) => lines.filter((line) => isNumber(line[values])).length;
  const found = { lines, n: lines.length, numbers: [has("a"), has("b")],
    left: Object.keys({ ...one, ...other }).filter((seed) => isNumber(one[seed]) !== isNumber(other[seed])).length };
  if (!found.n || Math.min(...found.numbers) < found.n) return found; // some did not arrive, or diverged
  const differences = lines.map((line) => line.difference);
  const largest = Math.max(...lines.flatMap((line) => [line.a, line.b]).map(Math.abs));
  found.mean = mean(differences);
  found.alike = differences.every((difference) => Math.abs(difference - differences[0]) <= ROUNDING * largest);
  if (found.n < DATA.seeds.fewest || found.alike) return found;
  found.sd = spread(differences);
  const half = DATA.seeds.t[found.n - DATA.seeds.fewest] * found.sd / Math.sqrt(found.n);
  return { ...found, low: found.mean - half, high: found.mean + half };
}

function seedsNeeded(sd, effect) { // the fewest that tell it from zero with enough power
  if (!sd || !effect) return null;
  const place = DATA.seeds.effect.findIndex((least) => least <= Math.abs(effect) / sd);
  return place < 0 ? `more than ${DATA.seeds.most}` : place + DATA.seeds.fewest;
}

VIEWS.compare = (now) => {
  const tables = { tuned: (of) => of.rows.some((row) => row.tuned), same: hasEqual,
    given: (of) => of.rows.some((row) => !row.tuned) };
  const given = Object.hasOwn(DATA.tables, now.table) ? pairIn(now) : null;
  const mode = MODES.some(([name]) => name === now.mode) ? now.mode : given ?? "tuned";
  const names = Object.keys(DATA.tables).filter((name) => tables[mode](DATA.tables[name]))
    .concat(mode === "same" ? Object.keys(DATA.sweeps).map((name) => `trials:${name}`)
      .filter((name) => hasEqual(tableOf(name))) : []);
  const name = names.includes(now.table) ? now.table : names.includes("table3_fair") ? "table3_fair" : names[0];
  const modes = radios("Hyperparameters", "mode", MODES, mode, { a: "", b: "", quantity: "" });
  if (!name) return [controls(modes), el("p", {}, "No table has such rows.")];
  const of = tableOf(name), variant = Math.max(0, of.variants.indexOf(now.variant ?? ""));
  const quantity = of.quantities.includes(now.quantity) ? now.quantity : of.metric;
  const has = of.rows.filter((row, place) => of.runs.some((run) => run.row === place && run.variant === variant));
  const partners = (a) => has.filter((b) => b !== a && modesOf(a, b, variant).includes(mode));
  const firsts = has.filter((a) => partners(a).length);
  const a = firsts.find((row) => row.id === now.a) ?? firsts
    .find((row) => row.baseline && partners(row).some((b) => b.id === row.baseline))
    ?? firsts[0];
  const others = a ? partners(a) : [];
  const b = others.find((row) => row.id === now.b) ?? others.find((row) => row.id === a.baseline) ?? others[0];
  const labels = (rows) => rows.map((row) => [row.id, row.name]);
  const panel = controls(modes, choice("Table", "table", names.map((id) => [id, id]), name,
    { a: "", b: "", quantity: "", variant: "" }),
    of.variants.length > 1 ? choice("Variant", "variant", of.variants.map((id) => [id, id]), of.variants[variant])
      : null,
    choice("Quantity", "quantity", of.quantities.map((id) => [id, id]), quantity),
    a ? choice("Row", "a", labels(firsts), a.id) : null, b ? choice("minus row", "b", labels(others), b.id) : null);
  if (!b) return [panel, el("p", {}, "No two rows of this table can be compared this way.")];
  return [panel, ...comparison(of, variant, quantity, a, b, now.effect)];
};

function pairIn({ table: name, a, b, variant }) { // how a link's two rows may be compared
  const [one, other] = [a, b].map((id) => DATA.tables[name].rows.find((row) => row.id === id));
  return one && other ? modesOf(one, other, Math.max(0, DATA.tables[name].variants.indexOf(variant ?? "")))[0]
    : undefined;
}

function comparison(of, variant, quantity, a, b, typed) {
  const found = compared(of, variant, quantity, a, b), keys = differing(a, b, variant);
  const what = DATA.quantities[quantity]?.what ?? quantity;
  const effect = Number(typed) || Math.abs(found.mean) || 0;
  const settled = found.low == null ? "" : found.low > 0 || found.high < 0 ? "The difference is resolved."
    : "Not resolved: zero is inside the interval.";
  const interval = found.n < DATA.seeds.fewest ? " (too few seeds for an interval)" : found.alike ? " in every seed"
    : ` [${signed(found.low)}, ${signed(found.high)}]`;
  const settings = keys.map((key) =>
    `${key} ${JSON.stringify(a.settings[variant][key])} versus ${JSON.stringify(b.settings[variant][key])}`);
  if (!found.n) return [el("p", { class: "answer" }, "These rows have no numbers for the same seeds.")];
  const seeds = table(["seed", a.name, b.name, "difference"], found.lines
    .map((line) => [line.seed, line.a, line.b, isNumber(line.a) && isNumber(line.b) ? line.difference : ""]));
  if (found.mean == null) return [el("p", { class: "answer", id: "answer" }, el("b", {}, a.name), " minus ",
    el("b", {}, b.name), `, ${quantity}: no mean: of ${found.n} seeds, ${found.numbers[0]} and `
    + `${found.numbers[1]} have a number.`), el("p", { class: "note" }, `${what}.`), seeds];
  const needed = found.sd ? seedsNeeded(found.sd, effect) : null;
  const rows = [...found.lines.map((line) => ({ ...line, label: "seeds" })),
    { label: "mean, 95 % interval", ...found, difference: found.mean }];
  const y = { field: "label", type: "nominal", title: null, sort: ["seeds"] };
  const x = (field) => ({ field, type: "quantitative", title: `${quantity}: difference`, scale: { zero: true } });
  return [
    el("p", { class: "answer", id: "answer" }, el("b", {}, a.name), " minus ", el("b", {}, b.name), `, ${quantity}: `,
      el("b", {}, `${signed(found.mean)}${interval}`), `, ${found.n} seeds. ${settled}`),
    el("p", { class: "note" }, `${what}. ${settings.length ? `The hyperparameters differ: ${settings.join("; ")}.`
      : "The rows have the same hyperparameters."}${found.left
        ? ` ${found.left} seeds have a number in one row only.` : ""}`),
    chart({ height: 110, layer: [
      { data: { values: [{ zero: 0 }] }, mark: { type: "rule", color: "#57606a", strokeDash: [4, 3] },
        encoding: { x: { ...x("zero") } } },
      { data: { values: rows.filter((row) => row.low != null) },
        mark: { type: "rule", strokeWidth: 3, color: COLOURS[1] },
        encoding: { y, x: x("low"), x2: { field: "high" } } },
      { data: { values: rows }, mark: { type: "point", size: 70, opacity: 0.85 }, encoding: { y, x: x("difference"),
        color: { condition: { test: "datum.label === 'seeds'", value: COLOURS[0] }, value: COLOURS[1] },
        tooltip: tips({ seed: "seed", a: "row", b: "other", difference: "difference" }) } }] },
    `Difference between ${a.name} and ${b.name} for each seed, with mean and interval`),
    found.sd ? el("p", {}, "Telling a difference of ", el("input",
      { type: "number", step: "any", id: "set-effect", size: 8,
      value: Number(effect.toPrecision(3)), "aria-label": "difference",
        onchange: (event) => go({ effect: event.target.value }) }),
    ` from zero in ${100 * DATA.seeds.power} % of all cases would take `,
      el("b", { id: "power" }, `${needed ?? "–"} seeds`),
    `: the differences have a standard deviation of ${show(found.sd, 3)} (estimated from ${found.n} seeds).`)
      : null,
    seeds];
}
