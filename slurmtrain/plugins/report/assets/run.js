"use strict";
/* The page of one run. */
Report.draws("run", (facts) => {
  const { run, timeline, curves, steps, words } = facts;
  const { element, section, numeric, format, known, time, printable } = Report;
  const KINDS = ["queue", "start", "preflight", "restore", "train", "stall", "stop", "lost"];
  const COLOURS = KINDS.map((kind) => `var(--${kind})`);
  const MEANING = {
    queue: "waiting in the queue, or suspended", start: "starting", preflight: "checking nodes and the network",
    restore: "restoring a checkpoint", train: "training that was kept", stall: "training stood still for a save",
    stop: "stopping", lost: "training that was done again, or a hang",
  };
  const attempts = new Map(run.attempts.map((attempt) => [attempt.number, attempt]));
  const date = (seconds) => new Date(1000 * seconds);
  const first = Math.min(...timeline.attempts.flatMap(({ intervals }) => intervals.slice(0, 1).map(([, begin]) => begin)));
  const plural = (count, word) => `${format.number(count)} ${word}${count === 1 ? "" : "s"}`;
  const ended = (attempt) => [attempt.cause ?? attempt.state, format.localized(attempt.reason)].filter(Boolean).join(": ");
  // Steps to which a run was rolled back: where attempts, and ranks restarted inside of them, began.
  const begins = run.attempts.slice(1).filter((attempt) => known(attempt.first_step));

  Report.head({ title: run.name, state: run.state, why: run.why, of: facts.as_of });

  function summary() {
    const spent = Report.onNodes(run.seconds);
    const { measures, cost } = run;
    section("summary", "Run", Report.tiles([
      { name: "step", value: known(run.step) ? format.number(run.step) : null, more: known(run.total_steps) ? `of ${format.number(run.total_steps)}` : null, data: { step: run.step } },
      { name: "goodput", value: known(run.goodput) ? format.share(run.goodput) : null, more: "of the time on nodes", data: { goodput: run.goodput } },
      { name: "on nodes", value: format.duration(spent), more: `${format.duration(run.seconds.queue)} in the queue` },
      { name: "attempts", value: String(run.attempts.length), more: run.attempts.length > 1 ? `the last: ${run.attempts.at(-1).cause ?? run.attempts.at(-1).state}` : null },
      { name: "lost steps", value: known(run.lost_steps) ? format.number(run.lost_steps) : null, more: run.lost_steps ? "trained again" : null, data: { lost: run.lost_steps } },
      { name: "rate", value: known(measures?.steps_per_second ?? run.steps_per_second) ? `${format.number(measures?.steps_per_second ?? run.steps_per_second)} /s` : null, more: "steps" },
      { name: "cost", value: cost?.spent ? figure(cost, cost.spent) : null, more: cost?.spent ? `${unitOf(cost)}, ${figure(cost, cost.lost)} lost` : null },
      ...Object.entries(run.metrics).slice(0, 2).map(([name, value]) => ({ name, value: format.number(value), more: "newest" })),
    ]), element("p", {}), Report.facts([
      ["id", Report.link(run.id)], ["reason", format.localized(run.reason)], ["params", words.params], ["command", run.command && element("code", {}, run.command)],
      ["submitted", run.submitted_at && time(run.submitted_at)], ["ended", run.ended_at && time(run.ended_at)],
      ["sweep", run.sweep && Report.link(run.sweep)], ["tags", run.tags.join(" ")], ["note", run.note],
      ["comes from", run.parents.map((parent) => `${parent.run} (${parent.relation})`).join(", ")],
      ["led to", run.children.map((child) => `${child.run} (${child.relation})`).join(", ")],
      ["directory", element("code", {}, run.dir)],
      ["because", facts.why.details.map((line) => element("div", {}, format.localized(line)))], ["what to do", facts.why.advice.map((line) => element("div", {}, format.localized(line)))],
    ]), Report.notes(facts.problems));
  }

  // --- time ---

  function spans() {
    const rects = [];
    for (const { number, intervals } of timeline.attempts) {
      for (const [kind, begin, end] of intervals) {
        const rect = { attempt: number, kind, begin, end };
        if (kind === "queue") rects.push({ ...rect, row: "queue" });
        else for (const { label, presences } of timeline.rows) {
          for (const [attempt, from, to] of presences) {
            if (attempt === number && Math.min(to, end) > Math.max(from, begin)) rects.push({ ...rect, begin: Math.max(from, begin), end: Math.min(to, end), row: label });
          }
        }
      }
    }
    return rects;
  }

  function tellSpan({ attempt: number, kind, begin, end, row }) {
    const attempt = attempts.get(number);
    const lines = [`attempt ${number}${row === "queue" ? "" : ` on ${row}`}`, `${kind}: ${MEANING[kind]}`, `${format.duration(end - begin)}, from ${format.time(begin)} to ${format.time(end).slice(11)}`];
    if (kind === "stop" || kind === "lost") {
      // What ended these ranks: the next restart in place, else the end of the attempt.
      const restart = words.restarts.find((each) => each.attempt === number && Date.parse(each.at) / 1000 >= begin);
      lines.push(restart ? `restarted in place: ${restart.text}` : `ended: ${ended(attempt)}`);
    }
    return printable(lines.join("\n"));
  }

  function marks() {
    const on = (attempt) => timeline.rows.find((row) => row.presences.some(([number]) => number === attempt))?.label;
    const of = (name, kind) => words[name].map((each) => ({ ...each, kind, row: on(each.attempt), x: new Date(each.at) }));
    return [...of("restarts", "restarted in place"), ...of("hangs", "hang"), ...of("stragglers", "straggler")].filter(({ row, at }) => row && at).sort((one, other) => one.x - other.x);
  }

  function timelineSection() {
    if (!timeline.rows.length && !timeline.attempts.some(({ intervals }) => intervals.length)) return;
    const rects = spans();
    const happened = marks();
    const rows = [...(rects.some(({ row }) => row === "queue") ? ["queue"] : []), ...timeline.rows.map(({ label }) => label)];
    const margin = Math.min(220, 25 + 7 * Math.max(...rows.map((row) => row.length)));
    const starts = timeline.attempts.filter(({ intervals }) => intervals.length).map(({ number, intervals }) => ({ number, x: date(intervals[0][1]) }));
    section("timeline", "Timeline", Report.legend(KINDS.filter((kind) => run.seconds[kind] > 0).map((kind) => [kind, `var(--${kind})`])),
      Report.chart(`What each of ${plural(run.attempts.length, "attempt")} spent its time on, by node`, (width) => ({
        width, height: 60 + 26 * rows.length, marginLeft: margin, marginTop: 28,
        x: { type: "time", label: null }, y: { domain: rows, label: null, tickSize: 0, padding: 0.15, tickFormat: (row) => printable(row.length > 28 ? `${row.slice(0, 27)}…` : row) },
        color: { domain: KINDS, range: COLOURS },
        marks: [
          Plot.barX(rects, { x1: (rect) => date(rect.begin), x2: (rect) => date(rect.end), y: "row", fill: "kind", className: "spans" }),
          Plot.ruleX(starts, { x: "x", stroke: "currentColor", strokeOpacity: 0.4, strokeDasharray: "2,3" }),
          Plot.text(starts.length > 40 ? [] : starts, { x: "x", text: (start) => `${starts.length > 12 ? "" : "attempt "}${start.number}`, frameAnchor: "top", dy: -16, dx: 3, textAnchor: "start", fill: "var(--faint)" }),
          Plot.dot(happened, { x: "x", y: "row", symbol: "kind", r: 5, fill: "var(--back)", stroke: "currentColor", strokeWidth: 1.5 }),
          Plot.tip(rects, Plot.pointer({ x1: (rect) => date(rect.begin), x2: (rect) => date(rect.end), y: "row", title: tellSpan, maxRadius: 60 })),
          Plot.tip(happened, Plot.pointer({ x: "x", y: "row", title: (mark) => printable(`${mark.kind}\n${mark.text}\n${format.time(mark.at)}`), maxRadius: 12, anchor: "top" })),
        ],
      })),
      timeline.shortest_s ? element("p", { class: "note" }, `Of what lasted less than ${format.duration(timeline.shortest_s)} at a time, the longest stands for all; the table below counts everything.`) : null,
      happened.length ? element("ul", {}, happened.map((mark) => element("li", {}, `attempt ${mark.attempt}, `, time(mark.at), `: ${mark.kind === "straggler" ? "" : `${mark.kind}: `}${mark.text}`))) : null,
      attemptTable());
  }

  function attemptTable() {
    const kinds = KINDS.filter((kind) => run.seconds[kind] > 0);
    return element("div", {}, Report.table({
      key: "attempts", most: 25, caption: "Attempts, and their seconds by kind", rows: run.attempts, rowAttributes: (attempt) => ({ data: { attempt: attempt.number } }),
      columns: [
        numeric("attempt", "number"),
        { name: "ended", value: (attempt) => attempt.cause ?? attempt.state, cell: (attempt) => [Report.state(attempt.state, attempt.cause ?? attempt.state), element("div", { class: "note" }, format.localized(attempt.reason))], long: true },
        { name: "nodes", value: (attempt) => attempt.nodes.length, number: true },
        { name: "started", value: (attempt) => attempt.started_at, cell: (attempt) => time(attempt.started_at) },
        { name: "steps", value: (attempt) => attempt.last_step, cell: (attempt) => (known(attempt.last_step) ? `${attempt.first_step ?? "?"} – ${attempt.last_step}` : "–"), number: true },
        numeric("lost steps", "lost_steps"),
        ...kinds.map((kind) => ({ name: kind, title: MEANING[kind], value: (attempt) => attempt.seconds[kind], cell: (attempt) => format.duration(attempt.seconds[kind]), number: true })),
      ],
    }), element("details", {}, element("summary", {}, "more about attempts"), run.attempts.map((attempt, index) => [
      element("h3", {}, `attempt ${attempt.number}`), Report.facts(groups(words.attempts[index])),
      words.last_lines[index].length ? element("pre", {}, words.last_lines[index].join("\n")) : null,
    ])));
  }

  // Facts of one name, such as several hangs, are lines of one value.
  function groups(pairs) {
    const names = [...new Set(pairs.map(([name]) => name))];
    return names.map((name) => [name, pairs.filter(([each]) => each === name).map(([, text]) => element("div", {}, text))]);
  }

  function goodputSection() {
    if (!timeline.goodput.length) return;
    const used = KINDS.filter((kind) => kind !== "queue" && run.seconds[kind] > 0).map((kind) => ({ kind, seconds: run.seconds[kind] }));
    const points = timeline.goodput.map(([at, share]) => ({ x: date(at), share }));
    section("goodput", "Goodput", element("p", { class: "note" }, "The share of the time on nodes that went into training that was kept: below, where the time went, and the share up to each moment."),
      Report.chart(`Seconds on nodes by kind: ${used.map(({ kind, seconds }) => `${kind} ${format.duration(seconds)}`).join(", ")}`, (width) => ({
        width, height: 62, marginTop: 4, x: { label: null, ticks: Math.max(3, width / 140), tickFormat: format.duration }, color: { domain: KINDS, range: COLOURS },
        marks: [Plot.barX(used, Plot.stackX({ x: "seconds", fill: "kind", title: ({ kind, seconds }) => `${kind}: ${format.duration(seconds)}\n${MEANING[kind]}`, tip: true }))],
      })),
      Report.chart("Goodput up to each moment", (width) => ({
        width, height: 180, x: { type: "time", label: null }, y: { domain: [0, 1], tickFormat: "%", label: "goodput so far", grid: true },
        marks: [
          Plot.ruleX(begins.filter((attempt) => attempt.started_at), { x: (attempt) => new Date(attempt.started_at), stroke: "currentColor", strokeOpacity: 0.4, strokeDasharray: "2,3" }),
          Plot.line(points, { x: "x", y: "share", stroke: "var(--train)", strokeWidth: 2, curve: "linear" }),
          Plot.tip(points, Plot.pointerX({ x: "x", y: "share", title: (point) => `${format.share(point.share)}\n${format.time(point.x.getTime() / 1000)}` })),
        ],
      })));
  }

  // --- curves ---

  function curveSection() {
    if (!curves.metrics.length) return;
    const SHOWN = 8;
    const grid = element("div", { class: "grid" });
    // What was chosen outlasts newer facts.
    const [state] = Report.choice("curves/state", { x: "step", log: false, words: "", all: false, replayed: true });
    const more = element("button", { type: "button", on: { click: () => { state.all = true; fill(); } } });
    let made = [];
    const redraw = () => made.forEach((figure) => figure.redraw());

    function fill() {
      const fitting = curves.metrics.filter(({ name }) => name.toLowerCase().includes(state.words.toLowerCase()));
      const cut = state.all ? fitting : fitting.slice(0, SHOWN);
      made = cut.map((metric) => curveChart(metric, state));
      grid.replaceChildren(...made.map((figure, index) => element("div", {}, element("h3", {}, cut[index].name), figure)));
      more.hidden = cut.length === fitting.length;
      more.textContent = `show all ${fitting.length} metrics`;
    }

    const controls = element("div", { class: "controls" },
      Report.select("curves/x", "over", ["step", "time", "hours since the start"], "step", (value) => { state.x = value; redraw(); }),
      Report.tick("curves/log", "logarithmic", false, (value) => { state.log = value; redraw(); }),
      run.lost_steps || curves.metrics.some(({ replayed }) => replayed.length) ? Report.tick("curves/replayed", "what was rolled back, in grey", true, (value) => { state.replayed = value; redraw(); }) : null,
      curves.metrics.length > 3 ? element("label", {}, "find", element("input", { type: "search", value: state.words, on: { input: (event) => { state.words = event.target.value; fill(); } } })) : null);
    fill();
    section("curves", "Curves", controls, grid, more, element("p", { class: "note" }, "Dotted lines: where attempts began."),
      run.metrics_from === "output" ? element("p", { class: "note" }, "These metrics are guessed from what the script prints.") : null,
      curves.left_out.length ? element("p", { class: "note" }, `${plural(curves.left_out.length, "more metric")} left out: ${curves.left_out.slice(0, 10).join(", ")}`) : null);
  }

  function curveChart({ name, kept, replayed }, state) {
    const start = run.started_at ? Date.parse(run.started_at) / 1000 : first;
    const rows = (columns, part) => columns.step.map((step, index) => ({
      step, at: curves.since + columns.time[index], value: columns.value[index], part,
      attempt: run.attempts.findLast((attempt) => attempt.started_at && Date.parse(attempt.started_at) / 1000 <= curves.since + columns.time[index])?.number,
    }));
    const line = rows(kept, 0);
    const grey = replayed.flatMap((part, index) => rows(part, index + 1));
    const place = { step: (row) => row.step, time: (row) => date(row.at), "hours since the start": (row) => (row.at - start) / 3600 };
    return Report.chart(`${name} over steps`, (width) => {
      const x = place[state.x];
      const log = state.log && line.some(({ value }) => value > 0);
      // A gap where there is no number, or none that a logarithm has.
      const y = (row) => (row.value === null || (log && row.value <= 0) ? NaN : row.value);
      const marked = begins.map((attempt) => ({ number: attempt.number, reason: attempt.reason, step: attempt.first_step, at: Date.parse(attempt.started_at) / 1000 })).filter(({ at }) => at || state.x === "step");
      const tell = (row) => printable(`${name} ${format.number(row.value)}\nstep ${format.number(row.step)}, attempt ${row.attempt ?? "?"}${row.part ? ", rolled back" : ""}\n${format.time(row.at)}`);
      return {
        width, height: 230, x: { type: state.x === "time" ? "time" : "linear", label: state.x === "time" ? null : state.x }, y: { type: log ? "log" : "linear", label: null, grid: true, tickFormat: log ? undefined : (value) => format.number(value), ticks: log ? 5 : undefined },
        marks: [
          Plot.ruleX(marked, { x, stroke: "currentColor", strokeOpacity: 0.45, strokeDasharray: "2,3" }),
          state.replayed ? Plot.line(grey, { x, y, z: "part", stroke: "var(--faint)", strokeOpacity: 0.7, strokeWidth: 1.2, className: "replayed" }) : null,
          Plot.line(line, { x, y, stroke: "var(--series-1)", strokeWidth: 1.6, className: "kept" }),
          line.length === 1 ? Plot.dot(line, { x, y, fill: "var(--series-1)" }) : null,
          Plot.tip(state.replayed ? [...line, ...grey] : line, Plot.pointerX({ x, y, title: tell })),
        ],
      };
    });
  }

  // --- steps ---

  function stepSection() {
    if (!steps) return;
    const { quantiles } = steps;
    const bars = steps.bars.filter(([, , count]) => count);
    const x = { type: steps.log ? "log" : "linear", label: "seconds of a step", tickFormat: format.number, ticks: 6 };
    const points = steps.points.map(([attempt, step, seconds]) => ({ attempt, step, seconds }));
    section("steps", "Steps", Report.tiles([
      { name: "50 % within", value: format.duration(quantiles.p50), data: { p50: quantiles.p50 } },
      { name: "95 % within", value: format.duration(quantiles.p95), data: { p95: quantiles.p95 } },
      { name: "99 % within", value: format.duration(quantiles.p99) },
      { name: "longest", value: format.duration(quantiles.max) },
    ]), element("div", { class: "grid" },
      element("div", {}, element("h3", {}, "How long steps took"), Report.chart(`Distribution of ${steps.count} times of steps, median ${format.duration(quantiles.p50)}`, (width) => ({
        width, height: 230, x, y: { label: "steps", grid: true },
        marks: [Plot.rectY(bars, { x1: (bar) => bar[0], x2: (bar) => bar[1], y: (bar) => bar[2], fill: "var(--series-1)", title: ([low, high, count]) => `${plural(count, "step")}\n${format.duration(low)} to ${format.duration(high)}`, tip: true }), Plot.ruleY([0])],
      }))),
      element("div", {}, element("h3", {}, "Over steps"), Report.chart("Time of each step over steps", (width) => ({
        width, height: 230, x: { label: "step" }, y: { type: steps.log ? "log" : "linear", label: "seconds", grid: true, tickFormat: format.number, ticks: 5 },
        marks: [
          Plot.ruleX(begins, { x: "first_step", stroke: "currentColor", strokeOpacity: 0.45, strokeDasharray: "2,3" }),
          Plot.dot(points, { x: "step", y: "seconds", r: 1.8, fill: "var(--series-1)", fillOpacity: 0.7 }),
          Plot.tip(points, Plot.pointer({ x: "step", y: "seconds", title: (point) => `step ${point.step}, attempt ${point.attempt}\n${format.duration(point.seconds)}` })),
        ],
      })))),
      words.stragglers.length ? element("div", {}, element("h3", {}, "Stragglers"), element("ul", {}, words.stragglers.map(({ attempt, text }) => element("li", {}, `attempt ${attempt}: ${text}`)))) : null,
      Report.table({
        key: "slowest", caption: "The slowest steps", rows: steps.slowest,
        columns: [
          numeric("step", "step"), numeric("attempt", "attempt"),
          numeric("took", "seconds", format.duration),
          { name: "finished", value: (row) => row.at, cell: (row) => time(row.at) },
          { name: "of that", value: (row) => row.why },
        ],
      }),
      element("p", { class: "note" }, "From one finished step to the next, with the saves in between; where only some steps are logged, the mean of those between. Measures leave saves out."));
  }

  // --- checkpoints ---

  function checkpointSection() {
    const { shown, left_out: leftOut } = facts.checkpoints;
    if (!shown.length) return;
    const stalled = shown.filter(({ stall_s: stall, saved_at: at }) => known(stall) && at);
    section("checkpoints", "Checkpoints", stalled.length ? Report.chart(`Seconds for which each of ${stalled.length} saves stalled training`, (width) => ({
      width, height: 180, x: { type: "time", label: null }, y: { label: "seconds stalled", grid: true, zero: true, tickFormat: format.number },
      marks: [
        Plot.ruleX(stalled, { x: (each) => new Date(each.saved_at), y: "stall_s", stroke: "var(--stall)" }),
        Plot.dot(stalled, { x: (each) => new Date(each.saved_at), y: "stall_s", r: 3.5, fill: (each) => (each.pruned_at ? "var(--back)" : "var(--stall)"), stroke: "var(--stall)" }),
        Plot.tip(stalled, Plot.pointerX({ x: (each) => new Date(each.saved_at), y: "stall_s", title: (each) => `step ${each.step}: ${format.duration(each.stall_s)} stalled, ${format.duration(each.seconds)} in all\n${format.bytes(each.bytes)}, why: ${each.why || "?"}${each.pruned_at ? "\ndeleted since" : ""}` })),
      ],
    })) : null, Report.table({
      key: "checkpoints-table", most: 15, rows: shown, sort: { column: "step", descending: true }, rowAttributes: (row) => ({ data: { step: row.step } }),
      columns: [
        numeric("step", "step"),
        { name: "saved", value: (row) => row.saved_at, cell: (row) => time(row.saved_at) },
        { name: "why", value: (row) => row.why },
        numeric("size", "bytes", format.bytes),
        numeric("stalled", "stall_s", format.duration),
        numeric("took", "seconds", format.duration),
        numeric("attempt", "attempt"),
        { name: "state", value: (row) => (row.pruned_at ? "deleted" : row.problem || (row.complete ? (row.verified ? "verified" : "on disk") : "damaged")) },
        { name: "kept", value: (row) => row.kept, long: true },
      ],
    }), leftOut ? element("p", { class: "note" }, `${plural(leftOut, "more checkpoint")} left out; "slurmtrain checkpoints" lists all.`) : null);
  }

  // --- what is measured, used and paid ---

  const figure = (cost, value) => format.amount(value, unitOf(cost));
  const unitOf = (cost) => cost.currency ?? cost.unit ?? "";

  function measureSection() {
    const measures = run.measures ?? {};
    const slow = (measures.slow_ranks ?? []).map((rank) => `rank ${rank} on ${measures.ranks.find((each) => each.rank === rank)?.node ?? "?"}`);
    const tile = (name, field, show, more) => ({ name, value: known(measures[field]) ? show(measures[field]) : null, more, data: { field, value: measures[field] } });
    const tiles = [
      tile("steps", "steps_per_second", (value) => `${format.number(value)} /s`), tile("median step", "step_p50_s", format.duration),
      tile("95 % of steps within", "step_p95_s", format.duration), tile("samples", "samples_per_second", (value) => `${format.number(value)} /s`),
      tile("tokens", "tokens_per_second", (value) => `${format.number(value)} /s`), tile("epoch", "epoch_seconds", format.duration),
      tile("waiting for data", "data_wait_share", format.share, "of a step"), tile("communication", "communication_share", format.share, "of a step"),
      tile("peak memory", "peak_memory_bytes", format.bytes, { gpu: "of a GPU, by torch", device: "of a whole GPU", process: "of a process" }[measures.memory]),
      tile("GPU utilization", "gpu_utilization", format.percent), tile("power", "gpu_power_w", (value) => `${format.number(value)} W`, "of a GPU"),
      tile("energy", "energy_kwh", (value) => `${format.number(value)} kWh`, "all GPUs, all attempts"), tile("MFU", "mfu", format.share, "of what its devices could compute"),
      // Without GPUs, this is of the nodes' processors.
      known(measures.gpu_utilization) ? tile("", "") : tile("CPU utilization", "utilization", format.percent),
    ].filter(({ value }) => known(value));
    if (!tiles.length) return;
    section("measures", "Measures", Report.tiles(tiles), slow.length ? element("p", {}, `Others wait for ${slow.join(", ")}.`) : null, rankChart(measures.ranks), rankTable(measures.ranks));
  }

  /* The ranks' own times, without what they waited for each other: who is slow. */
  function rankChart(ranks) {
    const timed = (ranks ?? []).filter(({ own_p50_s: own }) => known(own));
    if (timed.length < 2) return null;
    const colour = (rank) => (run.measures.slow_ranks.includes(rank.rank) ? "var(--lost)" : "var(--series-1)");
    return element("div", {}, element("h3", {}, "A step's own time by rank"), Report.chart("The median of each rank's own time in a step", (width) => ({
      width, height: 200, x: { label: "rank", type: "linear", ticks: Math.min(timed.length, 10), tickFormat: "d" }, y: { label: "seconds", zero: true, grid: true, tickFormat: format.number },
      marks: [Plot.dot(timed, { x: "rank", y: "own_p50_s", fill: colour, r: 3.5 }), Plot.tip(timed, Plot.pointer({ x: "rank", y: "own_p50_s", title: (rank) => `rank ${rank.rank} on ${printable(rank.node)}\n${format.duration(rank.own_p50_s)} of its own` }))],
    })));
  }

  function rankTable(ranks) {
    const timed = (ranks ?? []).filter((rank) => ["step_p50_s", "own_p50_s"].some((field) => known(rank[field])));
    return timed.length ? Report.table({
      key: "ranks", caption: "Ranks", most: 16, rows: timed,
      columns: [
        numeric("rank", "rank"), { name: "node", value: (rank) => rank.node },
        numeric("median step", "step_p50_s", format.duration), numeric("of its own", "own_p50_s", format.duration), numeric("95 % within", "step_p95_s", format.duration),
        numeric("waiting for data", "data_wait_share", format.share), numeric("communication", "communication_share", format.share), numeric("peak memory", "peak_memory_bytes", format.bytes),
      ],
    }) : null;
  }

  function usageSection() {
    const rows = (run.usage ?? []).filter((row) => known(row.used));
    if (!rows.length && !run.idle) return;
    const show = { bytes: format.bytes, seconds: format.duration };
    const column = (name) => ({ name, value: (row) => row[name], cell: (row) => (known(row[name]) && !show[row.unit] ? `${format.number(row[name])} ${row.unit}` : (show[row.unit] ?? format.number)(row[name])), number: true });
    section("usage", "Asked and used",
      run.idle ? element("p", {}, `${run.idle.gpus ? `Its ${plural(run.idle.gpus, "GPU")} have` : "Its processes have"} done nothing since `, time(run.idle.since), ".") : null,
      rows.length ? Report.table({
        key: "usage-table", rows, caption: "Of the node that used the most",
        columns: [
          { name: "resource", value: (row) => row.resource }, column("asked"), column("used"),
          { name: "share", value: (row) => (row.asked ? row.used / row.asked : null), cell: (row) => format.share(row.asked ? row.used / row.asked : null), number: true },
          { name: "would have sufficed", value: (row) => row.request ?? null, cell: (row) => (row.request ? element("code", {}, row.request) : "–") }, { name: "why", value: (row) => row.why, long: true },
        ],
      }) : null);
  }

  function costSection() {
    const { cost } = run;
    if (!cost || !cost.spent) return;
    const unit = unitOf(cost);
    const purposes = [["training", "train"], ["saving", "stall"], ["starting", "start"], ["stopping", "stop"], ["idle", "idle"], ["lost", "lost"]]
      .map(([name, colour]) => ({ name, colour: `var(--${colour})`, value: cost[name] })).filter(({ value }) => value > 0);
    const tile = (name, field, more) => ({ name, value: known(cost[field]) ? `${figure(cost, cost[field])} ${unit}` : null, more, data: { field, value: cost[field] } });
    section("cost", "Cost", Report.tiles([
      tile("spent", "spent"), tile("lost to interruptions", "lost", cost.spent ? `${format.share(cost.lost / cost.spent)} of it` : null),
      tile("on demand", "on_demand", "would have cost"), tile("saved by spot", "saved_by_spot"), tile("an interruption", "cost_of_interruption", plural(cost.interruptions ?? 0, "interruption")),
      { name: "break-even", value: known(cost.break_even_interruptions_per_hour) ? `${format.number(cost.break_even_interruptions_per_hour)} /h` : null, more: known(cost.interruptions_per_hour) ? `it had ${format.number(cost.interruptions_per_hour)} interruptions /h` : "interruptions" },
    ]), Report.legend(purposes.map(({ name, colour }) => [name, colour])), Report.chart(`What was paid for, in ${unit}: ${purposes.map(({ name, value }) => `${name} ${figure(cost, value)}`).join(", ")}`, (width) => ({
      width, height: 62, marginTop: 4, x: { label: null, ticks: Math.max(3, width / 140), tickFormat: format.number },
      marks: [Plot.barX(purposes, Plot.stackX({ x: "value", fill: "colour", title: ({ name, value }) => `${name}: ${figure(cost, value)} ${unit}`, tip: true }))],
    })), Report.facts([
      ["node-hours", format.number(cost.node_hours)], ["GPU-hours", cost.gpu_hours ? format.number(cost.gpu_hours) : null],
      ["interruptions", format.counts(cost.interruptions_by_cause ?? {})], ["not in money", cost.problem],
    ]));
  }

  // --- nodes and environment ---

  function plainTable(key, caption, { headers, rows }) {
    return rows.length ? Report.table({ key, caption, rows, most: 16, columns: headers.map((name, index) => ({ name: name.toLowerCase(), value: (row) => row[index], long: index === headers.length - 1 })) }) : null;
  }

  function nodeSection() {
    const { networks, nodes, clocks, findings } = words;
    if (!networks.rows.length && !nodes.rows.length) return;
    section("nodes", "Network and nodes", Report.facts([
      ["elected network", words.elected], ["clocks", clocks],
      ["not candidates", networks.excluded.map((line) => element("div", {}, line))], ["findings", findings.map((line) => element("div", {}, line))],
    ]), plainTable("networks", "Networks of the newest attempt, the elected one first", networks), plainTable("nodes-table", "Nodes of the newest attempt", nodes));
  }

  function environmentSection() {
    const changes = run.attempts.flatMap((attempt) => attempt.environment_changes.map((line) => element("div", {}, `attempt ${attempt.number}: ${line}`)));
    section("environment", "Code and environment", Report.facts([
      ["git", words.git === "-" ? null : words.git], ["commit", run.git?.commit && element("code", {}, run.git.commit)],
      ["code", run.code && `snapshot ${run.code.snapshot.slice(0, 12)} of ${run.code.root} (${plural(run.code.files, "file")}, ${format.bytes(run.code.bytes)})`],
      ["changed", changes], ["plan", run.plan_hash && element("code", {}, run.plan_hash)], ["executor", run.executor],
      ["MLflow run", run.mlflow_run_id],
      ["profiles", (run.profiles || []).map(({ attempt, tool, path, problem, bytes }) => element("div", {}, `attempt ${attempt}, ${tool}: `, problem || path === null ? problem || "no trace" : element("code", {}, path), bytes ? ` (${format.bytes(bytes)})` : ""))],
    ]), facts.spec ? element("details", { id: "spec" }, element("summary", {}, "spec"), element("pre", {}, facts.spec)) : null);
  }

  summary();
  timelineSection();
  goodputSection();
  curveSection();
  stepSection();
  checkpointSection();
  measureSection();
  usageSection();
  costSection();
  nodeSection();
  environmentSection();
});
