"use strict";
/* The page of one run. */
Report.draws("run", (facts) => {
  const { run } = facts;
  Report.head({ title: run.name, state: run.state, why: run.why, of: facts.as_of });
  Report.section("run", "Run", Report.facts([["id", run.id], ["reason", run.reason]]));
});
