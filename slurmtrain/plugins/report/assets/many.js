"use strict";
/* The page of many runs. */
Report.draws("many", (facts) => {
  Report.head({ title: facts.title, state: null, why: null, of: facts.as_of });
  Report.section("runs", "Runs", Report.runsTable("runs-table", facts.runs));
});
