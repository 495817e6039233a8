// Views of what can be computed: topology and planner.
const SIZES = { workers: [2, 3, 4, 6, 8, 12, 16, 24, 32, 64], hosts: [2, 4, 8, 16, 32], perHost: [1, 2, 4, 8] };
const named = (values) => values.map((value) => [String(value), String(value)]);

VIEWS.topology = (now) => {
  const { families, shared } = DATA.topologies;
  const family = Object.hasOwn(families, now.family) ? now.family : "one_peer_exponential";
  const sizes = Object.keys(families[family]).map((size) => size.split("/")),
    workers = [...new Set(sizes.map(([n]) => n))];
  const n = workers.includes(now.n) ? now.n : workers.includes("8") ? "8" : workers[0];
  const hosted = sizes.filter(([count]) => count === n).map(([, size]) => size),
    L = hosted.includes(now.L) ? now.L : hosted[0];
  const of = families[family][`${n}/${L}`], exact = of.gap === 1;
  const panel = controls(choice("Topology", "family", Object.keys(families).map((name) => [name, name]), family),
    choice("Workers", "n", named(workers), n), choice("Workers per host", "L", named(hosted), L));
  const lines = DATA.distances.filter((line) => line.family === family && String(line.workers) === n);
  const period = of.period ? `a period of ${of.period} round${of.period > 1 ? "s" : ""}`
    : "random rounds (the first four are shown)";
  return [panel,
    el("p", { class: "answer" }, `${n} workers on ${n / L} hosts, ${period}. Spectral gap `,
      el("b", {}, show(of.gap)), ". ",
      exact && of.period ? el("b", {},
        of.period === 1 ? "Every round averages exactly"
          : `A period of ${of.period} rounds, from its first on, averages exactly`)
        : of.consensus ? `It takes ${of.consensus} rounds to average to within 1e-10`
          : "It takes more than 2,000 rounds to average to within 1e-10", ".",
      of.spread ? ` Predicted consensus distance: ${show(of.spread[0], 3)} times that of a single displacement `
        + `(${show(of.spread[1], 3)} times with a momentum of 0.9).` : ""),
    el("div", { class: "rounds" }, of.rounds.slice(0, 8).map((place, t) => drawnRound(shared[place], Number(n),
      Number(L), t))),
    lines.length ? el("h3", {}, "Measured in finished runs") : el("p", { class: "note" },
      "No table has comparable runs with this topology and number of workers."),
    lines.length ? table(["row", "table", "workers per host", "seeds", "measured", "predicted",
      "measured / predicted"], lines.map((line) =>
      [line.name + (line.variant ? `, ${line.variant}` : ""), line.table, line.per_host, line.seeds, line.measured,
        line.scale ? "sets the scale" : line.predicted,
        line.scale ? "" : line.measured / line.predicted])) : null,
    distanceChart(family, n)];
};

function distanceChart(family, n) {
  const values = DATA.distances.filter((line) => !line.scale && String(line.workers) === n)
    .map((line) => ({ ...line, name: line.family }));
  if (!values.length) return null;
  const names = [...new Set(values.map((line) => line.name))].sort(), looks = looksOf(names);
  const ends = [Math.min, Math.max].map((of) => of(...values.flatMap((line) => [line.measured, line.predicted])));
  return el("div", {}, el("h3", {}, `All topologies with ${n} workers: measured against predicted`),
    el("p", { class: "note" }, "The prediction assumes that displacements of different workers are independent, equal "
      + "in size, proportional to the learning rate and correlated in time by momentum. Among comparable rows, the "
      + "row with the smallest prediction sets the scale. On the dashed line both are equal."),
    chart({ height: 320, layer: [
      { data: { values: ends.map((at) => ({ at })) }, mark: { type: "line", strokeDash: [5, 4], color: "#57606a",
        strokeWidth: 1 },
        encoding: { x: axis("at", "predicted consensus distance", true),
          y: axis("at", "measured consensus distance", true) } },
      { data: { values }, mark: { type: "point", opacity: 0.85 },
        encoding: { x: axis("predicted", "predicted consensus distance", true),
        y: axis("measured", "measured consensus distance", true),
        color: looks.color, shape: looks.shape, size: { condition: { test: `datum.name === '${family}'`, value: 150 },
          value: 45 },
        tooltip: tips({ family: "topology", series: "row", table: "table", measured: "measured",
          predicted: "predicted" }) } }] },
    `Measured against predicted consensus distances with ${n} workers`));
}

function drawnRound(round, n, L, t) {
  const size = n > 16 ? 250 : 190, radius = size / 2 - (L > 1 ? 34 : 20), middle = size / 2;
  const svg = (tag, attributes, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const at = (i, r = radius) => { // workers on a circle, those of a host close together
    const angle = 2 * Math.PI * ((i + 0.35 * (Math.floor(i / L) * L + (L - 1) / 2 - i)) / n) - Math.PI / 2;
    return [middle + r * Math.cos(angle), middle + r * Math.sin(angle)];
  };
  const ofHosts = round.kind === "hierarchical";
  const agent = (i) => (ofHosts ? at(i * L + (L - 1) / 2, radius * Math.cos(0.65 * Math.PI * (L - 1) / n)) : at(i));
  const pairs = round.groups ? round.groups.flatMap((members) => members
    .flatMap((a, k) => members.slice(k + 1).map((b) => [a, b, true])))
    : round.kind === "idle" ? [] : edgesOf(round).map(([a, b]) => [a, b, false]);
  const directed = new Set(pairs.map(([a, b]) => `${a},${b}`));
  const drawing = svg("svg", { viewBox: `0 0 ${size} ${size}`, width: size, height: size, role: "img",
    "aria-label": `Round ${t}: ${round.kind}` });
  drawing.append(svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6,
    markerHeight: 6, orient: "auto" },
    svg("path", { d: "M0 0L8 4L0 8z", fill: COLOURS[1] }))));
  if (L > 1) {
    for (let h = 0; h < n / L; h++) {
      const [x, y] = at(h * L + (L - 1) / 2, radius * Math.cos(0.65 * Math.PI * (L - 1) / n)),
        r = radius * Math.sin(0.65 * Math.PI * (L - 1) / n) + 9;
      drawing.append(svg("circle", { cx: x, cy: y, r, fill: ofHosts ? "#d7e8f5" : "#f0f2f4", stroke: "#aab3bd" }));
    }
  }
  for (const [a, b, both] of pairs) {
    if (!both && a > b && directed.has(`${b},${a}`)) continue; // drawn once, without arrow
    const oneWay = !both && !directed.has(`${b},${a}`), [x1, y1] = agent(a), [x2, y2] = agent(b),
      length = Math.hypot(x2 - x1, y2 - y1), cut = oneWay ? 8 : 0;
    drawing.append(svg("line", { x1, y1, x2: x2 - cut * (x2 - x1) / length, y2: y2 - cut * (y2 - y1) / length,
      stroke: COLOURS[oneWay ? 1 : 0],
      "stroke-width": pairs.length > 200 ? 0.4 : 1.3, ...(oneWay ? { "marker-end": "url(#arrow)" } : {}) }));
  }
  for (let i = 0; i < n; i++) {
    const [x, y] = at(i), [lx, ly] = at(i, radius + (L > 1 ? 19 : 12));
    drawing.append(svg("circle", { cx: x, cy: y, r: n > 32 ? 2.5 : 4, fill: "#1b1f24" }));
    if (n <= 16 || i % 4 === 0) drawing.append(svg("text", { x: lx, y: ly + 3.5, "font-size": 10,
      "text-anchor": "middle", fill: "#57606a" }, String(i)));
  }
  const kinds = { idle: "no messages", send_recv: "point to point", subgroup: "all-reduce in groups",
    hierarchical: "inside hosts, then between them" };
  return el("figure", {}, drawing, el("figcaption", {}, `round ${t}: ${kinds[round.kind]}`));
}

// Planner

const STEPS = { // of the sliders
  mbit: [10, 25, 50, 100, 200, 500, 1000, 2500, 5000, 10000, 25000, 50000, 100000, 200000, 400000],
  delay: [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50],
  million: [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 65, 100, 124, 200, 350, 500, 774, 1000, 1558, 3000, 7000],
  compute: [5, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000, 2000, 5000],
  jitter: [0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5],
};

VIEWS.planner = (now) => {
  const standard = DATA.planner.examples[0].settings, number = (key) =>
    (now[key] != null && Number.isFinite(Number(now[key])) ? Number(now[key]) : standard[key]);
  const settings = Object.fromEntries(Object.keys(standard).map((key) => [key, number(key)]));
  if (!SIZES.perHost.includes(settings.per_host)) settings.per_host = standard.per_host;
  const sizes = SIZES.hosts.filter((hosts) =>
    DATA.topologies.families.complete[`${hosts * settings.per_host}/${settings.per_host}`]);
  if (!sizes.includes(settings.hosts)) settings.hosts = sizes.filter((hosts) => hosts <= settings.hosts).pop()
    ?? sizes[0];
  const found = predictions(settings), best = found.slice(1)
    .reduce((one, other) => (other.step < one.step ? other : one));
  const pays = best.speedup >= 1.05, order = found.map((line) => line.method);
  const speed = (mbit) => (mbit >= 1000 ? `${mbit / 1000} Gbit/s` : `${mbit} Mbit/s`);
  const y = { field: "method", type: "nominal", sort: order, title: null, axis: { labelLimit: innerWidth < 600 ? 130 : 300 } };
  return [
    controls(choice("Hosts", "hosts", named(sizes), String(settings.hosts)),
      choice("Workers per host", "per_host", named(SIZES.perHost), String(settings.per_host)),
      slider("Between hosts", "mbit", STEPS.mbit, settings.mbit, speed),
        slider("Delay", "delay", STEPS.delay, settings.delay, (value) => `${value} ms`),
      slider("Model", "million", STEPS.million, settings.million, (value) => `${value} M parameters`),
      slider("Compute", "compute", STEPS.compute, settings.compute, (value) => `${value} ms`),
      slider("Jitter", "jitter", STEPS.jitter, settings.jitter, (value) => `${Math.round(100 * value)} %`)),
    el("p", { class: "answer", id: "advice" }, pays ? "Gossip is predicted to be faster: " : "Stay with all-reduce: ",
      pays ? el("b", {}, best.method) : "no gossip topology is more than 5 % faster",
      pays ? ` takes ${show(best.step)} ms per step, ${show(best.speedup, 3)} times as fast as all-reduce `
        + `(${show(found[0].step)} ms), and computes ${Math.round(100 * best.utilisation)} % of the time.`
        : `; all-reduce takes ${show(found[0].step)} ms per step and computes `
          + `${Math.round(100 * found[0].utilisation)} % of the time.`),
    chart({ height: 26 * found.length, data: { values: found.map((line) =>
      ({ ...line, shown: `${show(line.step, 3)} ms`, kind: line.method === "all-reduce" ? "all-reduce"
      : "gossip" })) }, layer: [
      { mark: { type: "bar", height: 15, opacity: 0.9 }, encoding: { y,
        x: { field: "step", type: "quantitative",
        title: "predicted step time (ms); dashed line: compute alone" },
        color: { field: "kind", type: "nominal", title: null,
          scale: { domain: ["all-reduce", "gossip"], range: [COLOURS[1], COLOURS[0]] }, legend: null },
        tooltip: tips({ method: "method", step: "step, ms", utilisation: "utilisation", speedup: "speed-up" }) } },
      { mark: { type: "text", align: "left", dx: 5, fontSize: 12 },
        encoding: { y, x: { field: "step", type: "quantitative" }, text: { field: "shown" } } },
      { mark: { type: "rule", color: "#1b1f24", strokeDash: [4, 3] },
        encoding: { x: { aggregate: "mean", field: "compute", type: "quantitative" } } }] },
        "Predicted step time by method"),
    table(["method", "step, ms", "utilisation", "speed-up over all-reduce", "spectral gap"], found.map((line) =>
      [line.method, line.step, line.utilisation, line.speedup, line.gap ?? ""]), null,
        (line) => ({ class: line[0] === best.method && pays && "chosen" })),
    el("p", { class: "note" }, `Parameters in fp32, sent in full. ${DATA.planner.steps} simulated steps. `,
      `Inside a host ${DATA.planner.cluster.intra_gbps} Gbit/s. `,
      "More methods, local steps, slow hosts, memory: ", el("code", {}, "python -m common.planner plan --help"))];
};
