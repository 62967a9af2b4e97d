"use strict";
/* The table of runs on the pages of a sweep and of many runs. */
Report.runs = (() => {
  const { element, numeric, format, known } = Report;

  /* A number that was summed, to three figures. */
  const rounded = (value) => (known(value) ? format.number(Number(value.toPrecision(3))) : "–");
  const spent = (run) => Report.onNodes(run.hours ?? {});
  /* The commonest error of a sweep, if there is one. */
  const failure = (errors) => errors && `${errors.runs} × ${errors.reason || "failed for no known reason"}`;

  const step = (run) => (known(run.step) ? format.number(run.step) + (known(run.total_steps) ? ` / ${format.number(run.total_steps)}` : "") : "–");

  /* The name of a column of params or metrics, with its section if another column is called so. */
  const distinct = (name, section, taken) => (taken.includes(name) ? `${section}.${name}` : name);

  /* The columns for facts with params, metrics and runs; those that say nothing about any run are left out. */
  function columns({ params, metrics, runs }) {
    const units = new Set(runs.filter((run) => run.cost).map((run) => run.cost.unit));
    const [unit] = units.size === 1 ? units : [];
    const money = (value, run) => (known(value) ? format.amount(value, run.cost.unit) + (unit ? "" : ` ${run.cost.unit}`) : "–");
    const isNumeric = (name) => runs.every((run) => typeof (run.params?.[name] ?? 0) === "number");
    const own = [
      { name: "name", value: (run) => run.name, differs: true },
      { name: "state", value: (run) => run.state, cell: (run) => Report.state(run.state) },
      { name: "sweep", value: (run) => run.sweep, cell: (run) => (run.sweep ? Report.link(run.sweep) : "–"), differs: true },
      { name: "step", number: true, value: (run) => run.step, cell: step },
      numeric("lost steps", "lost_steps"),
      numeric("goodput", "goodput", format.share),
      { name: "attempts", number: true, value: (run) => run.attempt || null },
      { name: "node-hours", number: true, value: (run) => (run.hours ? spent(run) : null), cell: (run) => (run.hours ? rounded(spent(run)) : "–"), title: "time on nodes, times the nodes" },
      { name: "lost hours", number: true, value: (run) => run.hours?.lost, cell: (run) => rounded(run.hours?.lost), title: "node-hours of training that was repeated" },
      { name: unit ? `cost, ${unit}` : "cost", number: true, value: (run) => run.cost?.spent, cell: (run) => money(run.cost?.spent, run) },
      { name: "lost cost", number: true, value: (run) => run.cost?.lost, cell: (run) => money(run.cost?.lost, run), title: "what interruptions cost" },
      { name: "submitted", value: (run) => run.submitted_at, cell: (run) => Report.time(run.submitted_at) },
      { name: "reason", long: true, value: (run) => run.reason },
      { name: "tags", value: (run) => run.tags?.join(", ") },
      { name: "note", long: true, value: (run) => run.note },
    ];
    const names = ["mark", "run", ...own.map((column) => column.name)];
    const logged = [
      ...params.map((name) => ({ name: distinct(name, "params", [...names, ...metrics]), number: isNumeric(name), value: (run) => run.params?.[name], cell: (run) => (known(run.params?.[name]) ? format.value(run.params[name]) : "–") })),
      ...metrics.map((name) => ({ name: distinct(name, "metrics", [...names, ...params]), number: true, value: (run) => run.metrics?.[name] })),
    ];
    // What a run was given and what came of it stand behind its name, state and sweep.
    const all = [...own.slice(0, 3), ...logged, ...own.slice(3)];
    return [
      { name: "run", value: (run) => run.id, cell: (run) => Report.link(run.id) },
      ...all.filter((column) => (column.differs ? new Set(runs.map(column.value)).size > 1 : runs.some((run) => known(column.value(run))))),
    ];
  }

  /* The table of some of the runs of facts. first: columns in front; the rest: of Report.table. */
  function table(facts, runs, { first = [], ...options } = {}) {
    return Report.table({ key: "runs-table", columns: [...first, ...columns(facts)], rows: runs, filter: "find", ...options });
  }

  const unpriced = (cost) => cost.unpriced.map((each) => `without ${format.number(each.runs)} runs: ${each.problem}`);

  /* The tile of what runs cost. */
  function costTile(cost) {
    const more = [
      cost.interruptions ? `${format.amount(cost.lost, cost.unit)} lost to ${format.number(cost.interruptions)} interruptions` : null,
      known(cost.on_demand) ? `${format.amount(cost.on_demand, cost.unit)} on demand` : null,
      ...unpriced(cost),
    ].filter(Boolean).join("; ");
    return { name: "cost", value: cost.spent && cost.unit !== "node-hours" ? `${format.amount(cost.spent, cost.unit)} ${cost.unit}` : null, more };
  }

  const MONEY = new Set(["spent", "lost", "saving", "starting", "cost_of_interruption"]);

  /* What runs cost, where there are prices or GPUs: node-hours are on the page anyway. */
  function costSection({ cost }) {
    if (!cost.spent || cost.unit === "node-hours") return;
    const amount = (value) => (known(value) ? `${format.amount(value, cost.unit)} ${cost.unit}` : null);
    const rate = cost.break_even_interruptions_per_hour;
    const columns = [
      ["spent", "spent"], ["lost", "lost"], ["saving", "saving"], ["starting", "starting"], ["interruptions", "interruptions"],
      ["cost_of_interruption", "one costs"], ["node_hours", "node-hours"], ["gpu_hours", "GPU-hours"],
    ];
    Report.section("cost", "Cost",
      Report.facts([
        ["spent", amount(cost.spent)],
        ["of that", ["training", "saving", "starting", "stopping", "lost"].filter((name) => cost[name]).map((name) => `${name} ${format.amount(cost[name], cost.unit)}`).join(", ")],
        ["an interruption", amount(cost.cost_of_interruption)],
        ["on demand", amount(cost.on_demand)],
        ["saved by spot", amount(cost.saved_by_spot)],
        ["spot pays", known(rate) ? `up to ${rounded(rate)} interruptions an hour; there were ${rounded(cost.interruptions_per_hour)}` : null],
      ]),
      Report.notes(unpriced(cost)),
      cost.partitions.length > 1 ? Report.table({
        key: "partitions-table", rows: cost.partitions,
        columns: [
          { name: "partition", value: (row) => row.partition },
          ...columns.filter(([field]) => cost.partitions.some((row) => row[field])).map(([field, name]) => numeric(name, field, MONEY.has(field) ? (value) => format.amount(value, cost.unit) : rounded)),
        ],
      }) : null);
  }

  return { costSection, table, spent, rounded, failure, distinct, costTile };
})();
