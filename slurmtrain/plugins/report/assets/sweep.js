"use strict";
/* The pages of a sweep, and of runs that are compared: what they were given, what came of it, and their curves. */
(() => {
  const { element, numeric, format, known, printable } = Report;
  const { spent, distinct } = Report.runs;
  // Far from each other for everybody, on light and on dark.
  const WORST = "#d9822b", BEST = "#2f7fd6", UNKNOWN = "#8b949e";
  // More lines than this have colours by their value.
  const NAMED = 6;

  /* Which runs a reader points at or has picked: every chart of the page shows them. */
  function highlighting() {
    const [picked] = Report.choice("marked", new Set());
    let pointed = null;
    const figures = [];
    function mark() {
      const some = picked.size || pointed;
      for (const figure of figures) {
        figure.classList.toggle("marked", Boolean(some));
        for (const line of figure.querySelectorAll("[data-runs]")) {
          const runs = line.dataset.runs.split(" ");
          line.classList.toggle("picked", runs.some((run) => picked.has(run) || run === pointed));
        }
      }
      for (const row of document.querySelectorAll("#runs-table tr[data-run]")) {
        row.classList.toggle("picked", picked.has(row.dataset.run));
        row.querySelector("input").checked = picked.has(row.dataset.run);
      }
    }
    return {
      mark,
      has: (run) => picked.has(run),
      toggle(run) {
        if (!picked.delete(run)) picked.add(run);
        mark();
      },
      /* A box that marks a run. */
      box(run) {
        return element("input", { type: "checkbox", checked: picked.has(run), aria: { label: `mark ${run}` }, on: { change: () => this.toggle(run) } });
      },
      /* A chart whose lines can be pointed at and clicked on; says(datum) describes what is pointed at. */
      chart(label, options, says) {
        const figure = Report.chart(label, options);
        figure.classList.add("pointed");
        const words = element("p", { class: "note", aria: { live: "polite" } }, "Point at a line to see its run, click to keep it marked.");
        const value = () => figure.querySelector("svg")?.value ?? figure.firstElementChild?.value;
        figure.addEventListener("input", () => {
          const datum = value();
          const run = datum?.runs?.[0] ?? null;
          if (run === pointed) return;
          pointed = run;
          if (datum) words.textContent = printable(says(datum));
          mark();
        });
        figure.addEventListener("click", () => { for (const run of value()?.runs ?? []) this.toggle(run); });
        // A new drawing has no marks yet.
        new MutationObserver(mark).observe(figure, { childList: true });
        figures.push(figure);
        return element("div", {}, figure, words);
      },
    };
  }

  /* Lets marks of Plot say which runs each of their lines is about. */
  const tagged = (data) => (index, scales, values, dimensions, context, next) => {
    const drawn = next(index, scales, values, dimensions, context);
    for (const line of drawn.querySelectorAll("path")) {
      const runs = data[line.__data__?.[0]]?.runs;
      if (runs) line.dataset.runs = runs.join(" ");
    }
    return drawn;
  };

  const differing = (run, names) => names.map((name) => `${name}=${format.value(run.params[name] ?? null)}`).join(", ");

  /* Colours by the metric that runs are judged by, from the worst to the best; the same in all charts. */
  function colours(values, larger) {
    const known = values.filter(Number.isFinite);
    const [low, high] = d3.extent(known);
    const between = d3.interpolateHcl(WORST, BEST);
    return (value) => {
      if (!Number.isFinite(value)) return UNKNOWN;
      const share = high > low ? (value - low) / (high - low) : 1;
      return between(larger ? share : 1 - share);
    };
  }

  /* A text of somebody else's, as far as it fits into a chart. */
  const short = (text) => printable(text.length > 24 ? `${text.slice(0, 23)}…` : text);

  // --- parallel coordinates ---

  /* Ticks that do not cover each other; the ends of an axis come first. */
  function apart(ticks) {
    const kept = [];
    const ends = (tick) => Math.min(tick.at, 1 - tick.at);
    for (const tick of d3.sort(ticks, ends)) if (kept.every((each) => Math.abs(each.at - tick.at) > 0.05)) kept.push(tick);
    return kept;
  }

  /* One axis: where values lie between 0 and 1, and which of them are written beside it. */
  function axis(name, values) {
    const present = values.filter((value) => known(value));
    if (present.every((value) => typeof value === "number")) {
      const [low, high] = d3.extent(present);
      const scale = low > 0 && high / low >= 8 ? d3.scaleLog([low, high], [0, 1]) : d3.scaleLinear([low, high], [0, 1]);
      const place = (value) => (high > low ? scale(value) : 0.5);
      const distinct = [...new Set(present)];
      const ticks = distinct.length <= 6 ? distinct : [low, ...scale.ticks(4).filter((tick) => scale(tick) > 0.06 && scale(tick) < 0.94), high];
      return { name, place: (value) => (known(value) ? place(value) : NaN), ticks: apart(ticks.map((tick) => ({ at: place(tick), text: format.number(tick) }))) };
    }
    const words = [...new Set(present.map(format.value))].sort((first, second) => first.localeCompare(second, "en", { numeric: true }));
    const place = (word) => (words.length > 1 ? words.indexOf(word) / (words.length - 1) : 0.5);
    const every = Math.ceil(words.length / 12);
    return {
      name,
      place: (value) => (known(value) ? place(format.value(value)) : NaN),
      ticks: words.filter((_, index) => index % every === 0).map((word) => ({ at: place(word), text: short(word) })),
    };
  }

  function parallel(facts, runs, metric, colour) {
    const names = facts.params.slice(0, 9);
    const axes = [
      ...names.map((name) => axis(name, runs.map((run) => run.params[name]))),
      ...(metric ? [axis(metric, runs.map((run) => run.metrics[metric]))] : []),
    ];
    const values = (run) => [...names.map((name) => run.params[name]), ...(metric ? [run.metrics[metric]] : [])];
    const points = runs.flatMap((run) => values(run).map((value, place) => ({
      place, at: axes[place].place(value), runs: [run.id], run, colour: colour(run.metrics[metric]),
    })));
    // Lines can be pointed at between the axes too.
    const targets = points.flatMap((point, index) => {
      const next = points[index + 1];
      if (next?.run !== point.run) return [point];
      return d3.range(0, 1, 0.25).map((share) => ({ ...point, place: point.place + share, at: point.at + share * (next.at - point.at) }));
    }).filter((target) => Number.isFinite(target.at));
    const ticks = axes.flatMap((each, place) => each.ticks.map((tick) => ({ ...tick, place })));
    return {
      height: 340, marginLeft: 90, marginRight: 90, marginTop: 30, marginBottom: 10,
      x: { domain: [0, Math.max(1, axes.length - 1)], ticks: d3.range(axes.length), tickFormat: (place) => short(axes[place].name), axis: "top", label: null, tickSize: 0, tickPadding: 10 },
      y: { domain: [0, 1], axis: null },
      marks: [
        Plot.ruleX(d3.range(axes.length), { stroke: "currentColor", strokeOpacity: 0.4 }),
        Plot.line(points, { x: "place", y: "at", z: (point) => point.run.id, stroke: "colour", strokeWidth: 1.5, strokeOpacity: 0.7, render: tagged(points) }),
        Plot.text(ticks, { x: "place", y: "at", text: "text", dx: -6, textAnchor: "end", fill: "currentColor", stroke: "var(--back)", strokeWidth: 4 }),
        Plot.dot(targets, Plot.pointer({ x: "place", y: "at", r: 4, fill: "colour" })),
      ],
    };
  }

  // --- curves ---

  function curveLines(curve, runs, mean) {
    const shown = new Map(runs.map((run) => [run.id, run]));
    const means = mean ? curve.means.filter((each) => each.runs.some((run) => shown.has(run))) : [];
    const averaged = new Set(means.flatMap((each) => each.runs));
    const single = curve.runs.filter((each) => shown.has(each.run) && !averaged.has(each.run));
    return [
      ...means.map((each) => ({ label: each.label, runs: each.runs, step: each.step, value: each.mean, low: each.low, high: each.high })),
      ...single.map((each) => ({ label: "", runs: [each.run], step: each.step, value: each.value })),
    ];
  }

  function curves(lines, metric, colour, log) {
    const named = lines.length <= NAMED;
    const points = lines.flatMap((line, index) => line.step.map((step, place) => ({
      step, value: !log || line.value[place] > 0 ? line.value[place] : null,
      low: line.low?.[place] ?? null, high: line.high?.[place] ?? null, runs: line.runs, label: line.label, index,
      colour: named ? Report.series(index) : colour(line.runs[0]),
    })));
    const drawn = points.filter((point) => known(point.value));
    if (!drawn.length) return null;
    const bands = points.filter((point) => known(point.low) && known(point.high) && (!log || point.low > 0));
    return {
      height: 320,
      x: { label: "step" },
      y: { label: short(metric), type: log ? "log" : "linear", grid: true, nice: true },
      marks: [
        Plot.areaY(bands, { x: "step", y1: "low", y2: "high", z: "index", fill: "colour", fillOpacity: 0.18, render: tagged(bands) }),
        Plot.line(points, { x: "step", y: "value", z: "index", stroke: "colour", strokeWidth: 1.5, strokeOpacity: 0.8, render: tagged(points) }),
        Plot.dot(drawn, Plot.pointer({ x: "step", y: "value", r: 3, fill: "colour" })),
      ],
    };
  }

  /* The curves of one metric at a time. label(line): what a line is called. */
  function curveSection(facts, marking, runs, colour, label) {
    const metrics = Object.keys(facts.curves);
    if (!metrics.length) return;
    let metric, mean = false, log = false;
    const holder = element("div");
    const hasMeans = metrics.some((name) => facts.curves[name].means.length);
    const legend = element("div");
    const lines = () => curveLines(facts.curves[metric], runs(), mean);
    const chart = marking.chart("Curves of a metric by step", () => curves(lines(), metric, colour, log), (point) =>
      `${label(point)}: ${metric} ${format.number(point.value)} at step ${format.number(point.step)}${known(point.low) ? `, from ${format.number(point.low)} to ${format.number(point.high)}` : ""}`);
    function draw() {
      if (!holder.isConnected && !holder.childElementCount) holder.append(chart);
      chart.querySelector("figure").redraw();
      const shown = lines();
      legend.replaceChildren(shown.length > 1 && shown.length <= NAMED ? Report.legend(shown.map((line, index) => [label(line), Report.series(index)])) : "");
    }
    const controls = element("div", { class: "controls" },
      Report.select("curves/metric", "metric", metrics, metrics[0], (value) => { metric = value; draw(); }),
      hasMeans ? Report.tick("curves/mean", `mean over ${facts.over.join(", ")}, with the range`, true, (value) => { mean = value; draw(); }) : null,
      Report.tick("curves/log", "logarithmic", false, (value) => { log = value; draw(); }));
    Report.section("curves", "Curves", controls, holder, legend);
    return draw;
  }

  // --- tables ---

  function groupTable(facts) {
    const rows = facts.groups.map((group, index) => ({ ...group, place: index + 1 }));
    const params = Object.keys(facts.groups[0].params).filter((name) => facts.params.includes(name));
    const taken = ["#", "runs", "±", "best run"];
    return Report.table({
      key: "groups-table",
      caption: `${facts.objective.metric} over ${facts.over.join(", ")}, as 'slurmtrain best --over ${facts.over.join(",")}' has it; ± is the standard deviation`,
      columns: [
        numeric("#", "place"),
        ...params.map((param) => ({ name: distinct(param, "params", taken), number: rows.every((group) => typeof (group.params[param] ?? 0) === "number"), value: (group) => group.params[param] ?? null, cell: (group) => format.value(group.params[param] ?? null) })),
        numeric("runs", "count"),
        numeric(`mean ${facts.objective.metric}`, "mean"),
        numeric("±", "deviation"),
        { name: "best run", value: (group) => group.runs[0], cell: (group) => Report.link(group.runs[0]) },
      ],
      rows,
    });
  }

  // --- pages ---

  function bestText(facts) {
    const { best, objective, groups } = facts;
    if (!best) return facts.notes[0];
    const first = groups[0];
    const mean = first && first.count > 1 ? `; the best mean is ${format.number(first.mean)}${known(first.deviation) ? ` ± ${format.number(first.deviation)}` : ""} over ${first.count} runs` : "";
    return `best run ${best.run}: ${best.metric} ${format.number(best.value)} (${objective.larger ? "larger" : "smaller"} is better)${mean}`;
  }

  const WHY = { search: "its search is for it", "checkpoint.keep.best": "checkpoint.keep.best names it", name: "by its name" };

  function drawSweep(facts) {
    for (const run of facts.runs) { run.params ??= {}; run.metrics ??= {}; }
    const marking = highlighting();
    const states = Object.keys(facts.states);
    const hidden = new Set();
    const shown = () => facts.runs.filter((run) => !hidden.has(run.state));
    const byId = new Map(facts.runs.map((run) => [run.id, run]));
    const judged = facts.objective?.metric ?? facts.metrics[0];
    const larger = facts.objective?.larger ?? true;
    const colour = colours(facts.runs.map((run) => run.metrics[judged]), larger);
    const redraws = [];
    const redraw = () => redraws.forEach((each) => each());

    Report.head({ title: facts.title, why: bestText(facts), of: facts.as_of });
    const nodeHours = d3.sum(facts.runs, spent);
    const useful = d3.sum(facts.runs, (run) => run.hours?.train ?? 0);
    Report.section("overview", "Overview",
      Report.tiles([
        { name: "runs", value: format.number(facts.runs.length), more: format.counts(facts.states) },
        { name: facts.best ? `best ${facts.best.metric}` : "", value: facts.best ? format.number(facts.best.value) : null, more: facts.best ? Report.link(facts.best.run) : null },
        { name: "node-hours", value: nodeHours ? format.number(Number(nodeHours.toPrecision(4))) : null, more: `${format.number(Number(d3.sum(facts.runs, (run) => run.hours?.lost ?? 0).toPrecision(3)))} lost` },
        { name: "goodput", value: nodeHours ? format.share(useful / nodeHours) : null },
        { name: "lost steps", value: format.number(d3.sum(facts.runs, (run) => run.lost_steps ?? 0)) },
        Report.runs.costTile(facts.cost),
      ]),
      Report.facts([
        ["swept", Object.entries(facts.swept).map(([name, values]) => element("div", {}, `${name}: ${values.slice(0, 12).map(format.value).join(", ")}${values.length > 12 ? `, … ${values.length} values` : ""}`))],
        ["judged by", facts.objective ? `${facts.objective.metric}, ${facts.objective.larger ? "larger" : "smaller"} is better: ${WHY[facts.objective.from]}` : null],
        ["search", facts.search ? `${format.counts(facts.search.states)} of ${facts.search.trials} trials` : null],
        ["errors", Report.runs.failure(facts.errors)],
      ]),
      Report.notes(facts.notes),
      states.length > 1 ? element("div", { class: "controls" }, states.map((state) =>
        Report.tick(`states/${state}`, state, true, (value) => { hidden[value ? "delete" : "add"](state); redraw(); }))) : null);

    if (facts.params.length && facts.metrics.length) {
      let metric;
      const says = (point) => `${point.run.id} (${point.run.state}): ${differing(point.run, facts.params)}${known(point.run.metrics[metric]) ? `; ${metric} ${format.number(point.run.metrics[metric])}` : ""}`;
      const ofMetric = () => (metric === judged ? colour : colours(facts.runs.map((run) => run.metrics[metric]), true));
      const chart = marking.chart("Params of runs and the metric that they led to", () => parallel(facts, shown(), metric, ofMetric()), says);
      const draw = () => chart.querySelector("figure").redraw();
      redraws.push(draw);
      Report.section("params", "Params",
        element("div", { class: "controls" },
          Report.select("params/metric", "metric", facts.metrics, judged, (value) => { metric = value; draw(); }),
          facts.params.length > 9 ? element("span", { class: "note" }, `the first 9 of ${facts.params.length} params`) : null),
        chart,
        Report.legend(facts.objective ? [["best", BEST], ["worst", WORST], ["no value", UNKNOWN]] : [["largest", BEST], ["smallest", WORST], ["no value", UNKNOWN]]));
    }
    const label = (line) => line.label || `${line.runs[0]} ${differing(byId.get(line.runs[0]), facts.params)}`;
    const drawCurves = curveSection(facts, marking, shown, (run) => colour(byId.get(run).metrics[judged]), label);
    if (drawCurves) redraws.push(drawCurves);
    if (facts.groups.some((group) => group.count > 1)) Report.section("seeds", "Repetitions", groupTable(facts));
    Report.runs.costSection(facts);
    const holder = element("div");
    const fill = () => {
      holder.replaceChildren(Report.runs.table(facts, shown(), {
        first: [{ name: "mark", value: (run) => Number(marking.has(run.id)), cell: (run) => marking.box(run.id) }],
        rowAttributes: (run) => ({ class: marking.has(run.id) ? "picked" : null, data: { run: run.id } }),
      }));
    };
    fill();
    redraws.push(fill);
    Report.section("runs", "Runs", holder);
  }

  // --- a comparison ---

  const spread = (each) => (each ? `${format.number(each.mean)}${known(each.deviation) ? ` ± ${format.number(each.deviation)}` : ""}` : "–");
  const setting = (value) => (known(value) ? format.value(value) : "–");

  /* What a run has of a metric: its newest value, and the best one with its step. */
  function score(each) {
    if (!each || !known(each.last)) return "–";
    const best = known(each.best) && each.best !== each.last ? ` (best ${format.number(each.best)} at step ${format.number(each.best_step)})` : "";
    return format.number(each.last) + best;
  }

  /* Few runs are columns, with a line for each setting and metric; many runs are lines. */
  function comparisonTable({ runs, differs, metrics }) {
    const heads = (run) => `${run.name} ${run.id}`;
    if (runs.length <= NAMED) {
      const lines = [
        { name: "state", cells: runs.map((run) => run.state) },
        ...metrics.map((name) => ({ name, cells: runs.map((run) => score(run.metrics[name])) })),
        ...differs.map((name) => ({ name, cells: runs.map((run) => setting(run.settings[name])) })),
      ];
      return Report.table({
        key: "comparison-table", rows: lines,
        columns: [{ name: "", value: (line) => line.name }, ...runs.map((run, index) => ({ name: heads(run), value: (line) => line.cells[index] }))],
      });
    }
    return Report.table({
      key: "comparison-table", rows: runs, filter: "find",
      columns: [
        { name: "run", value: (run) => run.id, cell: (run) => Report.link(run.id) },
        { name: "name", value: (run) => run.name },
        { name: "state", value: (run) => run.state, cell: (run) => Report.state(run.state) },
        ...metrics.flatMap((name) => [
          { name: distinct(name, "metrics", ["run", "name", "state", ...differs]), number: true, value: (run) => run.metrics[name]?.last },
          { name: `best ${name}`, number: true, value: (run) => run.metrics[name]?.best },
        ]).filter((column) => runs.some((run) => known(column.value(run)))),
        ...differs.map((name) => ({ name, value: (run) => run.settings[name], cell: (run) => setting(run.settings[name]) })),
      ],
    });
  }

  function meansTable({ groups, differs, metrics }) {
    const shared = differs.filter((name) => groups.some((group) => name in group.settings));
    return Report.table({
      key: "means-table", rows: groups, caption: "runs that differ only in seeds; ± is the standard deviation",
      columns: [
        { name: "name", value: (group) => group.name },
        ...shared.map((name) => ({ name, value: (group) => group.settings[name], cell: (group) => setting(group.settings[name]) })),
        { name: "runs", number: true, value: (group) => group.runs.length },
        ...metrics.map((name) => ({ name, number: true, value: (group) => group.metrics[name].last?.mean, cell: (group) => spread(group.metrics[name].last) })),
      ],
    });
  }

  /* What 'compare --performance --json' has of each run; columns without any value are left out. */
  function performanceTable({ runs, baseline }) {
    const columns = [
      { name: "run", value: (run) => run.id, cell: (run) => [Report.link(run.id), run.id === baseline ? " (baseline)" : ""] },
      { name: "name", value: (run) => run.name },
      numeric("nodes", "nodes"), numeric("processes", "processes"), numeric("GPUs", "gpus"),
      numeric("steps/s", "steps_per_second"), numeric("samples/s", "samples_per_second"), numeric("tokens/s", "tokens_per_second"),
      numeric("median step", "step_p50_s", format.duration), numeric("95 % within", "step_p95_s", format.duration),
      numeric("an epoch", "epoch_seconds", format.duration), numeric("all steps", "total_seconds", format.duration),
      numeric("waiting for data", "data_wait_share", format.share), numeric("communication", "communication_share", format.share),
      numeric("memory", "memory_bytes", (bytes, run) => `${format.bytes(bytes)} of a ${run.memory}`),
      numeric("utilization", "utilization", format.percent),
      numeric("GPU power", "gpu_power_w", (watts) => `${format.number(watts)} W`), numeric("energy", "energy_kwh", (energy) => `${format.number(energy)} kWh`),
      numeric("MFU", "mfu", format.share), numeric("hours for 1000 steps", "hours_per_1000_steps"),
      numeric("speed-up", "speedup"), numeric("of the ideal", "of_ideal", format.share),
    ];
    return Report.table({ key: "performance-table", rows: runs, columns: columns.filter((each) => runs.some((run) => known(each.value(run)))) });
  }

  function drawCompare(facts) {
    for (const run of facts.runs) { run.params ??= {}; run.metrics ??= {}; }
    const { comparison } = facts;
    const judged = comparison.by?.replace(/^metrics\./, "");
    const byId = new Map(comparison.runs.map((run) => [run.id, run]));
    const value = (run) => byId.get(run).metrics[judged]?.last;
    const colour = colours(comparison.runs.map((run) => value(run.id)), comparison.better === "larger");
    const marking = highlighting();
    Report.head({ title: facts.title, why: comparison.by ? `by ${comparison.by}: ${comparison.better} is better` : null, of: facts.as_of });
    Report.section("comparison", "Settings and metrics",
      comparison.differs.length ? null : Report.notes(["The runs have the same settings."]),
      comparisonTable(comparison), Report.notes(facts.notes));
    if (comparison.groups.some((group) => group.runs.length > 1)) Report.section("seeds", "Repetitions", meansTable(comparison));
    const label = (line) => {
      const { id, name, settings } = byId.get(line.runs[0]);
      return line.label || [name, id, ...Object.entries(settings).slice(0, 3).map(([key, each]) => `${key.replace(/^params\./, "")}=${setting(each)}`)].join(" ");
    };
    curveSection(facts, marking, () => facts.runs, (run) => colour(value(run)), label);
    Report.section("performance", "Performance", performanceTable(facts.performance), Report.notes(facts.performance.notes));
    Report.section("runs", "Runs", Report.runs.table(facts, facts.runs));
  }

  Report.draws("sweep", drawSweep);
  Report.draws("compare", drawCompare);
})();
