"use strict";
/* The page of many runs: what node-hours went into by day, interruptions by cause, sweeps, and the runs. */
(() => {
  const { element, numeric, format, known, onNodes } = Report;
  const { rounded } = Report.runs;
  const KINDS = ["train", "stall", "lost", "restore", "preflight", "start", "stop", "queue"];
  const colour = (kind) => `var(--${kind})`;
  const day = (text) => new Date(`${text}T00:00:00Z`);
  // Bars of more days could not be told apart.
  const BARS = 100;
  const MEASURES = { "all on nodes": onNodes, ...Object.fromEntries(KINDS.map((kind) => [kind, (hours) => hours[kind] ?? 0])) };

  /* One cell a day: weeks side by side, at least half a year of them. */
  function calendar(days, measure) {
    const known = new Map(days.map((each) => [each.day, each]));
    const end = d3.utcDay.offset(day(days.at(-1).day), 1);
    const first = d3.min([d3.utcMonday.floor(day(days[0].day)), d3.utcMonday.offset(d3.utcMonday.floor(end), -26)]);
    const week = (at) => d3.utcMonday.count(first, at);
    const last = week(end);
    const cells = d3.utcDays(first, end).map((at) => {
      const name = at.toISOString().slice(0, 10);
      const each = known.get(name) ?? { day: name, hours: {}, interruptions: {} };
      return { ...each, x: week(at), y: (at.getUTCDay() + 6) % 7, value: MEASURES[measure](each.hours) };
    });
    const busy = cells.filter((cell) => cell.value > 0);
    const months = d3.utcMonths(d3.utcMonth.ceil(first), end).map((at) => ({ x: week(at), text: d3.utcFormat(at.getUTCMonth() ? "%b" : "%Y")(at) }));
    return (width) => {
      const size = Math.max(9, Math.min(22, Math.floor((width - 60) / (last + 1))));
      return {
        width: Math.max(width, 60 + size * (last + 1)), height: 7 * size + 40, marginTop: 22, marginBottom: 8, marginLeft: 40,
        marginRight: Math.max(10, width - 50 - size * (last + 1)),
        x: { type: "band", domain: d3.range(last + 1), axis: null, paddingInner: 0.12 },
        y: { type: "band", domain: d3.range(7), tickSize: 0, tickFormat: (number) => ["Mon", "", "Wed", "", "Fri", "", "Sun"][number], label: null, paddingInner: 0.12 },
        opacity: { type: "sqrt", domain: [0, d3.max(busy, (cell) => cell.value) || 1], range: [0.15, 1] },
        marks: [
          Plot.text(months, { x: "x", text: "text", frameAnchor: "top", dy: -16, textAnchor: "start", fill: "currentColor" }),
          Plot.cell(cells, { x: "x", y: "y", fill: "var(--raised)", rx: 2 }),
          Plot.cell(busy, { ariaDescription: "node-hours of a day", x: "x", y: "y", fill: KINDS.includes(measure) ? colour(measure) : "var(--train)", fillOpacity: { value: "value", scale: "opacity" }, rx: 2 }),
          Plot.cell(cells, Plot.pointer({ x: "x", y: "y", stroke: "currentColor", strokeWidth: 1.5, rx: 2, fill: "none" })),
        ],
      };
    };
  }

  function describe(each) {
    const kinds = KINDS.filter((kind) => each.hours[kind]).map((kind) => `${kind} ${rounded(each.hours[kind])}`);
    const causes = format.counts(each.interruptions);
    return `${each.day}: ${kinds.join(", ") || "nothing"} node-hours${causes && `; interrupted: ${causes}`}`;
  }

  /* Stacked bars by day, or by week if there are many. */
  function bars(days, kinds) {
    const byWeek = days.length && d3.utcDay.count(day(days[0].day), day(days.at(-1).day)) > BARS;
    const parts = days.flatMap((each) => kinds.filter((kind) => each.hours[kind]).map((kind) => ({
      at: byWeek ? d3.utcMonday.floor(day(each.day)) : day(each.day), kind, hours: each.hours[kind],
    })));
    if (!parts.length) return null;
    return {
      height: 260, x: { label: byWeek ? "week" : "day", ticks: days.length <= 16 ? "day" : undefined }, y: { label: "node-hours", grid: true },
      marks: [
        Plot.rectY(parts, Plot.groupX({ y: "sum" }, { x: "at", y: "hours", fill: (part) => colour(part.kind), interval: byWeek ? "week" : "day", order: kinds.map(colour), inset: 0.5 })),
        Plot.ruleY([0]),
      ],
    };
  }

  function interruptions(facts) {
    const rows = Object.entries(facts.interruptions).map(([cause, each]) => ({ cause, ...each }));
    if (!rows.length) return Report.notes(["No attempt was interrupted."]);
    return [
      Report.chart("Interruptions by cause", () => ({
        height: 30 + 26 * rows.length, marginLeft: 110, x: { label: "interruptions", grid: true, tickFormat: "d" }, y: { label: null, domain: rows.map((row) => row.cause) },
        marks: [Plot.barX(rows, { x: "count", y: "cause", fill: "var(--lost)" }), Plot.text(rows, { x: "count", y: "cause", text: (row) => format.number(row.count), dx: 6, textAnchor: "start", fill: "currentColor" })],
      })),
      Report.table({
        key: "interruptions-table", rows, sort: { column: "times", descending: true },
        columns: [
          { name: "cause", value: (row) => row.cause },
          numeric("times", "count"),
          numeric("lost node-hours", "lost", rounded, { title: "training that had to be repeated, of the attempts that were interrupted so" }),
        ],
      }),
    ];
  }

  function sweeps(facts) {
    return Report.table({
      key: "sweeps-table", rows: facts.sweeps, filter: "find",
      columns: [
        { name: "sweep", value: (sweep) => sweep.id, cell: (sweep) => Report.link(sweep.id) },
        { name: "name", value: (sweep) => sweep.name },
        { name: "runs", number: true, value: (sweep) => d3.sum(Object.values(sweep.states)) },
        { name: "states", value: (sweep) => format.counts(sweep.states) },
        { name: "swept", long: true, value: (sweep) => sweep.swept },
        { name: "best", value: (sweep) => sweep.best?.value, cell: (sweep) => (sweep.best ? [Report.link(sweep.best.run), ` ${sweep.best.metric} ${format.number(sweep.best.value)}`] : "–") },
        { name: "errors", long: true, value: (sweep) => Report.runs.failure(sweep.errors) },
        { name: "submitted", value: (sweep) => sweep.submitted_at, cell: (sweep) => Report.time(sweep.submitted_at) },
      ],
    });
  }

  /* Whether a run may have been on nodes or in the queue on a day, by the reader's clock. */
  function wasThere(run, date, now) {
    const begin = new Date(`${date}T00:00:00`);
    const end = d3.timeDay.offset(begin, 1);
    return known(run.submitted_at) && new Date(run.submitted_at) < end && new Date(run.ended_at ?? now) >= begin;
  }

  function drawMany(facts) {
    const total = onNodes(facts.hours);
    const [kept, setDay] = Report.choice("calendar/day", null);
    let chosenDay = kept;
    const choose = (name) => { chosenDay = name; setDay(name); fill(); };
    Report.head({ title: facts.title, of: facts.as_of });
    Report.section("overview", "Overview",
      Report.tiles([
        { name: "runs", value: format.number(facts.total), more: format.counts(facts.states) },
        { name: "node-hours", value: total ? rounded(total) : null },
        { name: "goodput", value: known(facts.goodput) ? format.share(facts.goodput) : null, more: "of the time on nodes" },
        ...["lost", "stall", "queue"].map((kind) => ({ name: { lost: "lost", stall: "saving", queue: "waiting" }[kind], value: facts.hours[kind] ? rounded(facts.hours[kind]) : null, more: "node-hours" })),
        { name: "lost steps", value: format.number(facts.lost_steps) },
        { name: "interruptions", value: format.number(d3.sum(Object.values(facts.interruptions), (each) => each.count)) },
        Report.runs.costTile(facts.cost),
      ]),
      Report.notes(facts.notes));

    const table = element("div");
    const filtered = element("p", { class: "note", hidden: true });
    function fill() {
      const runs = chosenDay ? facts.runs.filter((run) => wasThere(run, chosenDay, facts.as_of)) : facts.runs;
      filtered.hidden = !chosenDay;
      filtered.replaceChildren(`runs of ${chosenDay} `, element("button", { type: "button", on: { click: () => choose(null) } }, "show all"));
      table.replaceChildren(Report.runs.table(facts, runs));
    }

    if (facts.days.length) {
      let measure, drawing;
      const chart = Report.chart("Node-hours of each day", (width) => drawing(width));
      chart.classList.add("pointed");
      const words = element("p", { class: "note", aria: { live: "polite" } }, "Point at a day to see its hours, click to see its runs.");
      const pointed = () => chart.querySelector("svg")?.value ?? null;
      chart.addEventListener("input", () => { if (pointed()) words.textContent = Report.printable(describe(pointed())); });
      chart.addEventListener("click", () => choose(pointed()?.day ?? null));
      Report.section("calendar", "Calendar",
        element("div", { class: "controls" }, Report.select("calendar/measure", "node-hours:", Object.keys(MEASURES).filter((name) => name === "all on nodes" || facts.hours[name]), "all on nodes", (value) => {
          measure = value;
          drawing = calendar(facts.days, measure);
          chart.redraw();
        })), chart, words);
      const shown = KINDS.filter((kind) => facts.hours[kind]);
      const hidden = new Set();
      const stack = Report.chart("Node-hours by day and kind", () => bars(facts.days, shown.filter((kind) => !hidden.has(kind))));
      Report.section("days", "Days",
        element("div", { class: "controls" }, shown.map((kind) => Report.tick(`days/${kind}`, kind, kind !== "queue", (value) => { hidden[value ? "delete" : "add"](kind); stack.redraw(); }))),
        Report.legend(shown.map((kind) => [kind, colour(kind)])), stack,
        element("p", { class: "note" }, `Days are in the time zone ${facts.zone}, where this page was made.`));
    }
    Report.section("interruptions", "Interruptions", ...interruptions(facts));
    Report.runs.costSection(facts);
    if (facts.sweeps.length) Report.section("sweeps", "Sweeps", sweeps(facts));
    fill();
    Report.section("runs", "Runs", filtered, table);
  }

  Report.draws("many", drawMany);
})();
