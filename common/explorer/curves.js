// Views of runs: curves, the gap to all-reduce, learning rates, and runs that have not ended.

// Curves

const ABSCISSAS = [["steps", "steps"], ["samples", "samples (language models: tokens)"],
  ["megabytes", "MB sent per worker"],
  ["seconds", "seconds"]];

function abscissa(grid, x) {
  const of = x === "steps" ? grid.steps : grid[x];
  return isNumber(of) ? grid.steps.map((step) => step * of) : of;
}

function curvesOf(of, chosen, metric, x, error, everySeed) {
  const points = [];
  for (const row of chosen) {
    of.variants.forEach((variant, number) => {
      const runs = of.runs.filter((run) => of.rows[run.row] === row && run.variant === number && run.curves[metric]);
      const label = row.name + (variant ? `, ${variant}` : "");
      const drawn = runs.map((run) => ({ run, at: abscissa(DATA.grids[run.curves[metric][0]], x),
        values: run.curves[metric][1]
        .map((value) => (isNumber(value) && error ? 1 - value / 100 : value)) })).filter((curve) => curve.at);
      const about = (some) => ({ name: label, commit: [...new Set(some
        .map(({ run }) => DATA.commits[run.commit].slice(0, 12)))].join(", "),
        command: row.commands[number].replace(/=K\b|_K\b/g, (mark) =>
          (some.length > 1 ? mark : mark[0] + some[0].run.seed)),
        time: some[0].run.measured ? "measured" : "predicted" });
      if (everySeed) {
        for (const curve of drawn) {
          curve.values.forEach((value, i) => points.push({ ...about([curve]), line: `${label} ${curve.run.seed}`,
            seeds: curve.run.seed,
            x: curve.at[i], y: value }));
        }
      } else if (drawn.length) {
        const length = Math.min(...drawn.map((curve) => curve.values.length));
        for (let i = 0; i < length; i++) {
          const values = drawn.map((curve) => curve.values[i]);
          if (!values.every(isNumber)) break; // a seed diverged: the mean of the others would mislead
          points.push({ ...about(drawn), line: label, seeds: drawn.map((curve) => curve.run.seed).join(", "),
            x: mean(drawn.map((curve) => curve.at[i])), y: mean(values), low: Math.min(...values),
              high: Math.max(...values) });
        }
      }
    });
  }
  return points;
}

VIEWS.curves = (now) => {
  const names = Object.keys(DATA.tables), name = names.includes(now.table) ? now.table : names.includes("table3_fair")
    ? "table3_fair" : names[0];
  if (!name) return el("p", {}, "No run has finished.");
  const of = DATA.tables[name], metrics = Object.keys(DATA.curves)
    .filter((key) => of.runs.some((run) => run.curves[key]));
  const standard = { top1: "accuracy" }[of.metric] ?? of.metric;
  const metric = metrics.includes(now.metric) ? now.metric : metrics.includes(standard) ? standard : metrics[0];
  const ids = of.rows.filter((row, place) => of.runs.some((run) => run.row === place));
  const chosen = now.rows === "-" ? [] : now.rows ? ids.filter((row) => now.rows.split(",").includes(row.id))
    : ids.slice(0, 5);
  const x = ABSCISSAS.some(([key]) => key === now.x) ? now.x : "steps";
  const best = Math.max(0, ...of.runs.flatMap((run) => run.curves.accuracy?.[1] ?? []).filter(isNumber));
  const isAccuracy = metric === "accuracy", error = isAccuracy && (now.error ?? (best >= 90 ? "1" : "0")) === "1";
  const logX = now.logx === "1", logY = error || now.logy === "1", everySeed = now.seeds === "1";
  const points = curvesOf(of, chosen, metric, x, error, everySeed)
    .filter((point) => isNumber(point.y) && isNumber(point.x) && (!logX || point.x > 0) && (!logY || point.y > 0));
  const least = Math.min(...points.map((point) => point.y));
  if (logY) points.forEach((point) => { point.low = Math.max(point.low, least / 2); }); // a band may reach zero
  const kinds = new Set(points.map((point) => point.time));
  const time = [...kinds].map((kind) => (kind === "measured" ? "measured"
    : `predicted for ${DATA.assumed}`)).join(" or ");
  const lines = [...new Set(points.map((point) => point.name))], looks = looksOf(lines);
  const banded = !everySeed && lines.length <= 3; // more of them hide each other
  const title = error ? "error: 1 − accuracy" : DATA.curves[metric];
  const label = ABSCISSAS.find(([key]) => key === x)[1] + (x === "seconds" ? `, ${time}` : "");
  const encoding = { x: axis("x", label, logX), detail: { field: "line" } };
  const tooltip = tips({ name: "row", seeds: everySeed ? "seed" : "mean of seeds", x: x, y: title, time: "times are",
    command: "command", commit: "commit" });
  return [
    controls(choice("Table", "table", names.map((id) => [id, id]), name, { rows: "", metric: "", error: "" }),
      choice("Metric", "metric", metrics.map((key) => [key, DATA.curves[key]]), metric),
        choice("Against", "x", ABSCISSAS, x),
      tick("log x", "logx", logX), isAccuracy ? tick("error on a log axis", "error", error)
        : tick("log y", "logy", logY),
      tick("every seed", "seeds", everySeed), rowsOf(ids.map((row) => [row.id, row.name]),
        chosen.map((row) => row.id), "rows")),
    el("p", { class: "note" }, `${of.title}. `, everySeed ? "One line per seed."
      : `Lines are means over seeds${banded ? "; bands span the lowest to the highest seed" : ""}.`),
    points.length ? chart({ height: 400, data: { values: points }, layer: [
      banded ? { mark: { type: "area", opacity: 0.13 }, encoding: { ...encoding, y: { ...axis("low", title, logY) },
        y2: { field: "high" },
        color: looks.color } } : null,
      { mark: { type: "line" }, encoding: { ...encoding, y: axis("y", title, logY), color: looks.color,
        strokeDash: looks.dash } },
      { mark: { type: "point", size: 30 }, encoding: { ...encoding, y: axis("y", title, logY), color: looks.color,
        shape: looks.shape, tooltip } }] }, `${title} against ${label} of ${lines.length} rows of ${name}`)
        : el("p", {}, "Nothing to draw: no row is selected, or none has values on these axes."),
    table(["row", "seeds", "times", "commits", "command"], chosen
      .flatMap((row) => of.variants.map((variant, number) => {
      const runs = of.runs.filter((run) => of.rows[run.row] === row && run.variant === number);
      return [row.name + (variant ? `, ${variant}` : ""), runs.map((run) => run.seed).join(", "),
        el("span", { class: runs[0]?.measured ? "measured" : "predicted" },
          runs[0]?.measured ? "measured" : "predicted"),
        [...new Set(runs.map((run) => DATA.commits[run.commit].slice(0, 12)))].join(", "),
          el("code", {}, row.commands[number])];
    })), "The runs; K stands for a seed")];
};

// Law of the gap

VIEWS.gap = (now) => {
  const { points, causes, units, sources } = DATA.gap, unit = Object.hasOwn(units, now.quantity) ? now.quantity
    : "validation_loss";
  const cause = Object.hasOwn(causes, now.x) ? now.x : "horizon";
  const kinds = [["tuned", "each tuned"], ["given", "set by hand"]];
  const all = points.filter((point) => point.quantity === unit && isNumber(point[cause]));
  const tables = [...new Set(all.map((point) => point.table))],
    of = all.filter((point) => !tables.includes(now.table) || point.table === now.table);
  const mode = now.mode === "given" || now.mode === "tuned" ? now.mode : of.some((point) => point.tuned) ? "tuned"
    : "given";
  const logX = (now.logx ?? "1") === "1", logY = now.logy === "1";
  // Against the horizon, a row of tables that differ in it alone (gpt2_horizon_10 and so on) is a line.
  const NUMBER = /_\d+$/, isOfLine = (point) => cause === "horizon" && (point.published || NUMBER.test(point.table));
  const label = (point) => (point.published ? `published, ${point.name}` : isOfLine(point)
    ? `${point.table.replace(NUMBER, "")}: ${nameOf(point)}` : point.table);
  const nameOf = (point) => point.name ?? DATA.tables[point.table].rows.find((row) => row.id === point.row).name;
  const shown = of.filter((point) => point.tuned === (mode === "tuned") && (!logX || point[cause] > 0)
    && (!logY || point.gap > 0))
    .map((point) => ({ ...point, series: nameOf(point), name: label(point)
      + (point.published && cause !== "workers" ? `, ${point.workers} workers` : ""),
      x: point[cause], href: point.published ? null : link({ view: "compare", table: point.table,
        variant: point.variant, a: point.row, b: point.partner }) }));
  const names = [...new Set(shown.map((point) => point.name))].sort(), looks = looksOf(names);
  // Beside each other where many have the same number of workers or horizon.
  const isCrowded = (point) => cause === "workers" || (cause === "horizon" && !point.published);
  const crowd = names.filter((name) => shown.some((point) => point.name === name && isCrowded(point)));
  shown.forEach((point) => { point.at = isCrowded(point)
    ? point.x * 1.025 ** (crowd.indexOf(point.name) - (crowd.length - 1) / 2) : point.x; });
  const joined = shown.filter(isOfLine), title = `gap to all-reduce, ${units[unit]}`;
  const x = axis("at", causes[cause], logX), data = { values: shown };
  return [
    controls(radios("Hyperparameters", "mode", kinds, mode), choice("Against", "x", Object.entries(causes), cause),
      choice("Gap in", "quantity", Object.entries(units).map(([key, text]) => [key, `${text} (${key})`]), unit),
      choice("Table", "table", [["", "all"], ...named(tables)], now.table ?? ""),
      tick("log x", "logx", logX), tick("log gap", "logy", logY)),
    shown.length ? chart({ height: 380, layer: [
      logY ? null : { data: { values: [{ zero: 0 }] }, mark: { type: "rule", strokeDash: [4, 3], color: "#57606a" },
        encoding: { y: { field: "zero", type: "quantitative" } } },
      { data: { values: joined }, mark: { type: "line", strokeWidth: 1.2 },
        encoding: { x, y: axis("gap", title, logY), color: looks.color } },
      { data: { values: shown.filter((point) => isNumber(point.low) && (!logY || point.low > 0)) },
        mark: { type: "rule", opacity: 0.45 },
        encoding: { x, y: axis("low", title, logY), y2: { field: "high" }, color: looks.color } },
      { data, mark: { type: "point", size: 65, opacity: 0.9 },
        encoding: { x, y: axis("gap", title, logY), color: looks.color, shape: looks.shape, href: { field: "href" },
        tooltip: tips({ name: "table", series: "row", partner: "all-reduce", variant: "variant", gap: "gap",
          low: "low", high: "high", seeds: "seeds", x: causes[cause] }) } }] },
          `Gap to all-reduce against ${causes[cause]}`) : el("p", { class: "answer" },
          `No ${mode === "tuned" ? "tuned " : ""}table has both a gap in ${units[unit]} and this x axis.`),
    el("p", { class: "note" }, `${shown.length} of ${points.length} points; click one of ours to see its seeds. `,
      Object.values(sources).map((text) => `Published: ${text}. `)),
    table(["table", "row", "gap", "low", "high", "seeds", causes[cause]],
      shown.map((point) => [point.href ? el("a", { href: point.href }, point.name) : point.name,
      point.series + (point.variant ? `, ${point.variant}` : ""),
      point.gap, point.low, point.high, point.seeds, point.x]))];
};

// Learning rates

VIEWS.rates = (now) => {
  const names = Object.keys(DATA.sweeps), name = names.includes(now.table) ? now.table : names.includes("table3_fair")
    ? "table3_fair" : names[0];
  if (!name) return el("p", {}, "No sweep has finished.");
  const sweep = DATA.sweeps[name], RATE = "optimizer.lr", places = sweep.methods.map((_, place) => place);
  const only = sweep.methods.findIndex((method) => method.id === now.method), shown = only < 0 ? places : [only];
  const rateOf = (method) => Number(method.chosen.find((text) => text.startsWith(`${RATE}=`))?.split("=")[1]);
  const every = sweep.trials.filter(([method]) => shown.includes(method))
    .map(([method, place, seed, value]) => [method, sweep.points[place], seed, value])
    .map(([method, point, seed, value]) => ({ name: sweep.methods[method].name, rate: point[RATE], seed, value,
      others: Object.entries(point).filter(([key]) => key !== RATE)
        .map(([key, of]) => `${key.split(".").pop()} ${of}`).join(", ") }));
  const trials = every.filter((trial) => isNumber(trial.value));
  const complete = Object.values(Object.groupBy(every, (trial) => `${trial.name} ${trial.others} ${trial.rate}`))
    .filter((some) => some.every((trial) => isNumber(trial.value))); // as a sweep's choice leaves out what diverged
  const means = complete.map((some) => ({ ...some[0], value: mean(some.map((trial) => trial.value)) }));
  const better = (a, b) => (sweep.best === "highest" ? b.value - a.value : a.value - b.value);
  const best = Object.values(Object.groupBy(means, (point) => `${point.name} ${point.rate}`))
    .map((some) => some.sort(better)[0]);
  const chosen = shown.map((place) => sweep.methods[place]).map((method) =>
    ({ name: method.name, rate: rateOf(method), value: method.value,
    low: method.interval?.[0], high: method.interval?.[1] })).filter((point) => isNumber(point.value));
  const looks = looksOf(shown.map((place) => sweep.methods[place].name)), x = axis("rate", "learning rate", true);
  const y = axis("value", `${sweep.quantity}, trials`, now.logy === "1");
  const tooltip = tips({ name: "method", rate: "rate", others: "other values", value: sweep.quantity, seed: "seed" });
  const nextOf = (method) => { // how little may have decided
    const [first, second] = best.filter((point) => point.name === method.name).sort(better);
    const groups = complete.filter(([trial, ...more]) => trial.name === method.name && more.length)
      .map((some) => some.map((trial) => trial.value));
    if (!second || !groups.length) return "";
    const scatter = Math.sqrt(mean(groups.map((values) => spread(values) ** 2)));
    return `; at ${show(second.rate, 3)} the mean is ${show(Math.abs(first.value - second.value), 2)} worse, `
      + `while trials with other seeds scatter by ${show(scatter, 2)}`;
  };
  const how = (method) => method.edge ? `at the ${method.edge} rate tried: a better one may lie beyond`
    : method.interval
    ? `95 % interval of the rate: ${method.interval.map((end) => show(end, 3)).join(" to ")}, `
      + `a factor of ${show(method.interval[1] / method.interval[0], 2)}`
    : `the best of the rates tried${nextOf(method)}; no interval was fitted`;
  return [
    controls(choice("Table", "table", names.map((id) => [id, id]), name, { method: "" }),
      choice("Method", "method", [["", "all"], ...sweep.methods.map((method) => [method.id, method.name])],
        now.method ?? ""),
      tick("log y", "logy", now.logy === "1")),
    chart({ height: 380, layer: [
      { data: { values: trials }, mark: { type: "point", opacity: 0.45, size: 28 },
        encoding: { x, y, color: looks.color, shape: looks.shape, tooltip } },
      { data: { values: best }, mark: { type: "line" }, encoding: { x, y, color: looks.color,
        strokeDash: looks.dash } },
      { data: { values: chosen.filter((point) => point.low) }, mark: { type: "rule", strokeWidth: 3, opacity: 0.6 },
        encoding: { x: { ...x, field: "low" }, x2: { field: "high" }, y, color: looks.color } },
      { data: { values: chosen }, mark: { type: "point", shape: "diamond", size: 170, stroke: "#1b1f24",
        strokeWidth: 1.5 }, encoding: { x, y, color: looks.color,
        tooltip: tips({ name: "method", rate: "chosen rate", value: sweep.quantity, low: "low",
          high: "high" }) } }] },
    `${sweep.quantity} of trials against the learning rate; diamonds are the chosen rates`),
    el("p", { class: "note" }, "Small marks are trials, lines are means over seeds at the best other "
      + "values, and diamonds are the chosen rates with their intervals."),
    table(["method", "rate", "other values", sweep.quantity, "certainty", "trials", "diverged"],
      shown.map((place) => sweep.methods[place]).map((method) =>
      [method.name, rateOf(method), method.chosen.filter((text) => !text.startsWith(`${RATE}=`)).join(" "),
        method.value, how(method), method.trials, method.diverged]))];
};

// Runs that have not ended

VIEWS.live = () => {
  const duration = (s) => !isNumber(s) ? "" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min`
    : `${show(s / 3600, 2)} h`;
  const points = ABOUT.live.flatMap((run) => run.curve.filter(([, loss]) => isNumber(loss))
    .map(([step, loss]) => ({ name: run.run, step, loss })));
  const names = [...new Set(points.map((point) => point.name))], looks = looksOf(names);
  document.querySelector("#live > .table").hidden = true;
  return [
    el("p", { class: "note" }, `Running: ${ABOUT.live.filter((run) => run.state === "running").length} of `
      + `${ABOUT.live.length} unfinished. This page reloads every ${RELOAD_S} s.`),
    points.length ? chart({ height: 320, data: { values: points }, mark: { type: "line", point: { size: 14 } },
      encoding: {
      x: axis("step", "steps", false), y: axis("loss", "training loss", true),
        color: { ...looks.color, legend: names.length > 12 ? null : looks.color.legend },
      strokeDash: names.length > 12 ? { ...looks.dash, legend: null } : looks.dash, tooltip: tips({ name: "run", step: "step", loss: "loss" }) } },
        "Training loss of unfinished runs") : null,
    table(["run", "state", "step", "progress", "left", "loss", "validation", "last row"],
      ABOUT.live.map((run) => [run.run, run.state, run.step,
      el("span", {}, el("progress", { value: run.share, max: 1 }), ` ${show(100 * run.share, 2)} %`),
        duration(run.seconds_left), run.loss,
      Object.entries(run.validation).map(([key, value]) => `${key} ${show(value)}`).join(", "),
        run.written.replace("T", " ").slice(0, 19)]))];
};
