"use strict";
/* The page of a scaling study: what follows from it, speed-ups with the law of each series, and its three tables. */
Report.draws("scale", (facts) => {
  const { element, section, table, numeric, chart, legend, format, known } = Report;
  const { runs, scaling } = facts;
  const names = [...new Set(runs.map((run) => run.series))];
  const colour = (name) => Report.series(names.indexOf(name));
  const of = (id) => runs.find((run) => run.id === id);
  const hundredths = (value) => value.toFixed(2);
  const hour = facts.currency ? `${facts.currency} / 1000 steps` : `${facts.unit}-hours / 1000 steps`;

  const columns = {
    id: { name: "id", value: (run) => run.id, cell: (run) => Report.link(run.id) },
    series: { name: "strategy", value: (run) => run.series },
    hardware: { name: "hardware", value: (run) => run.hardware },
    state: { name: "state", value: (run) => run.state, cell: (run) => Report.state(run.state) },
    nodes: numeric("nodes", "nodes"),
    processes: numeric("processes", "processes"),
    gpus: { name: "GPUs", value: (run) => run.gpus || null, number: true },
    batch: numeric("batch", "batch", format.number, { title: "samples of all processes in a step" }),
    steps: numeric("steps/s", "steps_per_second"),
    samples: numeric("samples/s", "samples_per_second"),
    epoch: numeric("s/epoch", "epoch_seconds"),
    memory: numeric("memory", "memory_bytes", format.bytes, { title: "of the GPU or process that needed most" }),
    utilization: numeric("utilization", "utilization", format.percent),
    speedup: numeric("speed-up", "speedup", hundredths),
    efficiency: numeric("efficiency", "efficiency", hundredths, { title: "the speed-up divided by how many times as many workers" }),
    communication: numeric("communication", "communication_share", format.share, { title: "its share of a step" }),
    throughput: numeric("throughput", "throughput", hundredths, { title: "times the smallest" }),
    total: numeric("total", "total_seconds", format.duration),
    price: numeric(hour, "price_per_1000_steps"),
    value: numeric("cost efficiency", "cost_efficiency", hundredths),
  };
  const chosen = (words) => words.split(" ").map((word) => columns[word]);

  /* What is known of no run has no column. */
  function rowsTable(id, title, words, rows) {
    if (!rows.length) return;
    const shown = chosen(words).filter((column) => rows.some((row) => known(column.value(row))));
    section(id, title, table({ key: `${id}-table`, columns: shown, rows }));
  }

  Report.head({ title: facts.title, why: facts.progress, of: facts.as_of });
  if (facts.sentences.length) section("advice", "What follows", element("ul", {}, facts.sentences.map((each) => element("li", {}, each))));

  const fitted = scaling.filter((each) => each.law);
  if (fitted.length) {
    const measured = runs.filter((run) => known(run.speedup) && fitted.some((each) => each.series === run.series));
    const law = fitted.flatMap((each) => each.law.curve.map(([workers, speedup]) => ({ series: each.series, workers, speedup })));
    const ends = [Math.min(...law.map((point) => point.workers)), Math.max(...law.map((point) => point.workers))];
    const sizes = [...new Set([...measured.map((run) => run.workers), ...ends])];
    const ideal = ends.map((workers) => ({ workers, speedup: workers / ends[0] }));
    const point = { x: "workers", y: "speedup" };
    section("speedup", "Speed-up",
      legend([...fitted.map((each) => [each.series, colour(each.series)]), ["ideal", "var(--faint)"]]),
      chart("speed-ups over sizes", () => ({
        height: 340,
        x: { label: fitted[0].unit === "GPU" ? "GPUs" : "processes", type: "log", base: 2, ticks: sizes, tickFormat: String },
        // Both logarithmic: the ideal is a line then.
        y: { label: "speed-up", type: "log", base: 2, grid: true, tickFormat: String },
        marks: [
          Plot.line(ideal, { ...point, stroke: "var(--faint)", strokeDasharray: "4 4" }),
          Plot.line(law, { ...point, z: "series", stroke: (each) => colour(each.series) }),
          Plot.dot(measured, { ...point, fill: (each) => colour(each.series), r: 4, tip: true,
            channels: { run: "id", series: "series", efficiency: (run) => (known(run.efficiency) ? hundredths(run.efficiency) : "–") } }),
        ],
      })),
      element("p", { class: "note" }, "Dots are measured; lines are the law that is fitted to them, up to twice the largest size."));
  }
  const alike = runs.filter((run) => run.hardware === "equal");
  rowsTable("sizes", "Sizes", "id series state nodes processes gpus batch steps samples epoch memory speedup efficiency communication", alike);
  rowsTable("strategies", "Strategies", "id series state nodes processes gpus memory epoch steps samples utilization", facts.strategies.map(of));
  rowsTable("hardware", "Hardware", "id hardware state nodes processes gpus samples steps throughput total price value",
    facts.hardware.map((each) => ({ ...of(each.id), ...each })));
});
