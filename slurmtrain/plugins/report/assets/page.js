"use strict";
/* The frame of every page: head, contents, theme, sections, tables, charts, and how numbers and times are written.

A page's own script calls Report.draws(kind, draw); draw(facts) then fills the page, whenever there are facts: those in
the page, or, if the page names a source, those that it fetches there, again with each Report.refresh(). Texts come into
the page as text only: the policy in its head forbids to make elements of strings. */
const Report = (() => {
  const drawers = {};
  // What a reader has chosen, such as the order of a table: it outlasts a refresh.
  const chosen = new Map();
  const charts = [];
  const UNSAFE = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
  const place = (id) => document.getElementById(id);

  /* An element. attributes: properties by name, with "class", "data", "aria", "on" (listeners) and "style" (custom
  properties) as objects; null and undefined are left out. Children: elements, strings, numbers, lists, null. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "class") made.className = value;
      else if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
      else if (name === "style") for (const [property, each] of Object.entries(value)) made.style.setProperty(property, each);
      else if (name === "data") Object.assign(made.dataset, value);
      else if (name === "aria") for (const [key, each] of Object.entries(value)) made.setAttribute(`aria-${key}`, each);
      else made.setAttribute(name, value === true ? "" : name === "title" ? printable(value) : value);
    }
    const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
    made.append(...shown.map((child) => (child instanceof Node ? child : printable(child))));
    return made;
  }

  /* A text whose controls, and characters that reorder or hide others, can be seen, as commands print it. */
  function printable(text) {
    return String(text).replace(UNSAFE, (character) => `\\u{${character.codePointAt(0).toString(16)}}`);
  }

  // --- how values are written ---

  const pad = (number) => String(number).padStart(2, "0");
  const known = (value) => value !== null && value !== undefined;
  const format = {
    /* A number to four figures; whole numbers in full. */
    number(value) {
      if (!known(value)) return "–";
      if (typeof value !== "number") return String(value);
      if (Number.isInteger(value)) return value.toLocaleString("en-US");
      const size = Math.abs(value);
      return size >= 1e6 || size < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(4)));
    },
    /* A sum of money, to a hundredth, or of hours: without its unit. */
    amount(value, unit) {
      if (!known(value) || unit.endsWith("-hours") || Math.abs(value) < 1) return format.number(value);
      return value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
    },
    /* A share from 0 to 1 as percent. */
    share: (value) => (known(value) ? `${Number((100 * value).toPrecision(3))} %` : "–"),
    percent: (value) => format.share(known(value) ? value / 100 : null),
    bytes(value) {
      if (!known(value)) return "–";
      const units = ["B", "KiB", "MiB", "GiB", "TiB"];
      let unit = 0;
      for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
      return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
    },
    /* A length of time in seconds, to two units; short ones to a millisecond. */
    duration(seconds) {
      if (!known(seconds)) return "–";
      if (seconds < 1 && seconds > 0) return `${Number((1000 * seconds).toPrecision(3))} ms`;
      if (seconds < 10) return `${Number(seconds.toPrecision(3))} s`;
      const whole = Math.floor(seconds);
      const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
      if (days) return `${days} d ${pad(hours)} h`;
      if (hours) return `${hours} h ${pad(minutes)} min`;
      return minutes ? `${minutes} min ${pad(whole % 60)} s` : `${whole} s`;
    },
    /* A time, ISO or seconds since 1970, by the reader's clock. */
    time(moment) {
      if (!known(moment)) return "–";
      const date = new Date(typeof moment === "number" ? 1000 * moment : moment);
      const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
      return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
    },
    /* A sentence, with the ISO times in it by the reader's clock. */
    localized: (text) => text.replace(/\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z/g, (moment) => format.time(moment)),
    /* How many there are of each: numbers by name. */
    counts: (numbers) => Object.entries(numbers).map(([name, count]) => `${count} ${name}`).join(", "),
    /* Any value of JSON, as in a spec. */
    value: (value) => (typeof value === "string" ? value : typeof value === "number" ? String(value) : JSON.stringify(value)),
  };

  /* A time as an element that shows UTC when it is pointed at. */
  function time(moment) {
    if (!known(moment)) return "–";
    const iso = typeof moment === "number" ? new Date(1000 * moment).toISOString() : moment;
    return element("time", { datetime: iso, title: iso }, format.time(moment));
  }

  /* The seconds or hours on nodes, of those by kind. */
  const onNodes = (byKind) => d3.sum(Object.entries(byKind), ([kind, each]) => (kind === "queue" ? 0 : each));

  // --- the parts of a page ---

  /* The state of a run, or another text in the colour of that state. */
  const state = (name, text = name) => element("span", { class: `state ${name}` }, text);

  /* Sentences in small print, each a paragraph. */
  const notes = (texts) => texts.map((text) => element("p", { class: "note" }, text));

  /* The head: title, the state of a run and a sentence if there are any, and when the facts were true. */
  function head({ title, state: ofRun = null, why = null, of }) {
    const { links, source } = place("facts").dataset;
    place("head").replaceChildren(
      links && !source.endsWith("/many") ? element("a", { class: "up", href: "/" }, "← all runs") : "",
      element("h1", {}, title),
      ofRun ? state(ofRun) : "",
      element("span", { class: "of" }, "as of ", time(of)),
      themeButton(),
      why ? element("p", { class: "why" }, format.localized(why)) : "",
    );
  }

  const THEMES = ["auto", "light", "dark"];

  function setTheme(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    // A page from a file may have no storage.
    try { localStorage.setItem("slurmtrain-theme", theme); } catch { /* it is forgotten */ }
  }

  function theme() {
    return document.documentElement.dataset.theme ?? "auto";
  }

  function themeButton() {
    const label = () => `theme: ${theme()}`;
    const button = element("button", { id: "theme", type: "button" }, label());
    button.addEventListener("click", () => {
      setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
      button.textContent = label();
    });
    return button;
  }

  /* A section with a heading, at the end of the page and in its contents. Returns it. */
  function section(id, title, ...children) {
    const made = element("section", { id, aria: { labelledby: `${id}-title` } }, element("h2", { id: `${id}-title` }, title), ...children);
    place("main").append(made);
    place("contents").append(element("a", { href: `#${id}` }, title));
    return made;
  }

  /* Terms and what they are; what is null, undefined or empty is left out. */
  function facts(pairs) {
    const rows = pairs.filter(([, value]) => known(value) && value !== "" && value.length !== 0);
    return element("dl", { class: "facts" }, rows.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  }

  /* Figures in large letters: [{name, value, more, data}]; those without a value are left out. */
  function tiles(items) {
    return element("div", { class: "tiles" }, items.filter((item) => known(item.value)).map((item) =>
      element("div", { class: "tile", data: item.data ?? {} },
        element("div", { class: "name" }, item.name),
        element("div", { class: "value" }, item.value),
        item.more ? element("div", { class: "more" }, item.more) : null)));
  }

  /* A choice that outlasts a refresh: [value, set]. */
  function choice(key, initial) {
    if (!chosen.has(key)) chosen.set(key, initial);
    return [chosen.get(key), (value) => chosen.set(key, value)];
  }

  /* A list to choose from, and a box to tick; change(value) is called with each choice, and at once with the present one. */
  function select(key, label, options, initial, change) {
    let [value, set] = choice(key, initial);
    if (!options.includes(value)) value = initial;
    const list = element("select", {}, options.map((option) => element("option", { value: option, selected: option === value }, option)));
    list.addEventListener("change", () => { set(list.value); change(list.value); });
    change(value);
    return element("label", {}, label, list);
  }

  function tick(key, label, initial, change) {
    const [value, set] = choice(key, initial);
    const box = element("input", { type: "checkbox", checked: value });
    box.addEventListener("change", () => { set(box.checked); change(box.checked); });
    change(value);
    return element("label", {}, box, label);
  }

  // --- tables ---

  /* A column of numbers: a field of each row, as show(value, row) writes it. */
  const numeric = (name, field, show = format.number, more = {}) => ({
    name, number: true, value: (row) => row[field], cell: (row) => (known(row[field]) ? show(row[field], row) : "–"), ...more,
  });

  const ROWS = 200;

  function compare(first, second) {
    // What is unknown comes last in both directions.
    if (typeof first === "number" && typeof second === "number") return first - second;
    return String(first).localeCompare(String(second), "en", { numeric: true });
  }

  /* A table that sorts by a click on a heading. columns: [{name, value(row), cell(row), number, title, long}], where
  value is what it sorts by and, without cell, shows; sort: {column (its name), descending} to begin with; filter: a
  label of a field that finds rows by their text; most: how many rows are shown before all are asked for; rowAttributes(row): of a row's element. key: unique in the page. */
  function table({ key, caption, columns, rows, sort = null, filter = null, most = ROWS, rowAttributes = () => ({}) }) {
    const [state] = choice(`${key}/state`, { order: sort, all: false, text: "" });
    const body = element("tbody");
    const heads = columns.map((column) => {
      const button = element("button", { type: "button", title: column.title ?? null }, column.name);
      button.addEventListener("click", () => {
        const again = state.order?.column === column.name;
        state.order = { column: column.name, descending: again ? !state.order.descending : Boolean(column.number) };
        fill();
      });
      return element("th", { scope: "col", class: column.number ? "number" : null }, button);
    });
    const more = element("button", { type: "button", hidden: true, on: { click: () => { state.all = true; fill(); } } });

    function cell(column, row) {
      const value = column.value(row);
      const shown = column.cell ? column.cell(row) : column.number ? format.number(value) : known(value) ? String(value) : "–";
      const classes = [column.number ? "number" : "", column.long ? "long" : ""].join(" ").trim();
      return element("td", { class: classes || null, data: known(value) && typeof value !== "object" ? { value } : {} }, shown);
    }

    function fill() {
      let shown = rows;
      const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
      if (words.length) {
        shown = shown.filter((row) => {
          const text = columns.map((column) => column.value(row) ?? "").join(" ").toLowerCase();
          return words.every((word) => text.includes(word));
        });
      }
      const column = columns.find((each) => each.name === state.order?.column);
      if (column) {
        const sign = state.order.descending ? -1 : 1;
        const empty = (value) => Number(!known(value) || Number.isNaN(value));
        shown = [...shown].map((row) => [column.value(row), row]).sort(([first], [second]) =>
          empty(first) - empty(second) || (empty(first) ? 0 : sign * compare(first, second))).map(([, row]) => row);
      }
      heads.forEach((heading, index) => {
        if (columns[index] === column) heading.setAttribute("aria-sort", state.order.descending ? "descending" : "ascending");
        else heading.removeAttribute("aria-sort");
      });
      const cut = state.all ? shown : shown.slice(0, most);
      body.replaceChildren(...cut.map((row) => element("tr", rowAttributes(row), columns.map((each) => cell(each, row)))));
      more.hidden = cut.length === shown.length;
      more.textContent = `show all ${format.number(shown.length)} rows`;
    }

    fill();
    const made = element("table", { id: key }, caption ? element("caption", {}, caption) : null, element("thead", {}, element("tr", {}, heads)), body);
    const field = filter && element("input", { type: "search", value: state.text, on: { input: (event) => { state.text = event.target.value; fill(); } } });
    return element("div", {}, field && element("div", { class: "controls" }, element("label", {}, filter, field)), element("div", { class: "scroll", tabindex: 0 }, made), more);
  }

  // --- charts ---

  /* A chart by Observable Plot: options(width) returns what Plot.plot takes; null: there is nothing to draw. It is drawn
  again when its width changes, and by redraw(). label: what it shows, for those who cannot see it. */
  function chart(label, options) {
    const figure = element("figure", { class: "chart", role: "img", aria: { label } });
    let width = 0;
    function redraw() {
      if (!width) return;
      const made = options(width);
      figure.replaceChildren(made ? Plot.plot({ width, marginLeft: 55, ...made, style: { background: "none", color: "inherit", fontSize: "12px", ...made.style } }) : element("p", { class: "note" }, "nothing to draw"));
    }
    function fit() {
      const now = figure.clientWidth;
      if (now && now !== width) { width = now; redraw(); }
    }
    const observer = new ResizeObserver(fit);
    observer.observe(figure);
    charts.push({ observer, fit });
    figure.redraw = redraw;
    return figure;
  }

  /* Which colour stands for what: [[name, colour]]. */
  function legend(entries) {
    return element("div", { class: "legend" }, entries.map(([name, colour]) => element("span", { style: { "--colour": colour } }, name)));
  }

  /* The id of a run or a sweep: a link to its page where the page is served, else text. */
  function link(id) {
    const { links } = place("facts").dataset;
    return links ? element("a", { href: `${links}${encodeURIComponent(id)}`, class: "mono" }, id) : element("span", { class: "mono" }, id);
  }

  const series = (index) => `var(--series-${(index % 6) + 1})`;

  // --- facts ---

  /* Draws a page, or draws it again with newer facts: what a reader has scrolled to, opened or is typing stays. */
  function show(facts) {
    for (const { observer } of charts.splice(0)) observer.disconnect();
    const restore = remember();
    for (const id of ["head", "contents", "main"]) place(id).replaceChildren();
    document.title = facts.title;
    place("foot").replaceChildren(`slurmtrain ${facts.version}`);
    drawers[facts.kind](facts);
    // Now, not when the observers notice: without charts the page would be too short to scroll to where it was.
    for (const { fit } of charts) fit();
    restore();
    document.documentElement.dataset.drawn = facts.as_of;
    document.documentElement.dataset.revision = facts.revision ?? "";
  }

  /* Elements by their section, and their place among others of its kind there: the same ones after another drawing. */
  function landmarks(selector) {
    const found = new Map();
    for (const section of document.querySelectorAll("section")) {
      [...section.querySelectorAll(selector)].forEach((each, index) => found.set(`${section.id} ${index}`, each));
    }
    return found;
  }

  /* What the reader looks at and does; returns a function that restores it. */
  function remember() {
    // The section at the top of the window, with some room for the padding above one that was jumped to.
    const anchor = [...document.querySelectorAll("section")].filter((section) => section.getBoundingClientRect().top <= 100).at(-1);
    const offset = anchor?.getBoundingClientRect().top;
    const scrolled = [...landmarks(".scroll, pre")].filter(([, each]) => each.scrollLeft || each.scrollTop).map(([name, each]) => [name, each.scrollLeft, each.scrollTop]);
    const opened = [...landmarks("details")].map(([name, each]) => [name, each.open]);
    const fields = "input, select, button, a";
    const active = document.activeElement;
    const [focused] = [...landmarks(fields)].find(([, each]) => each === active) ?? [];
    const selection = active?.type === "search" ? [active.selectionStart, active.selectionEnd] : null;
    return () => {
      const details = landmarks("details");
      for (const [name, open] of opened) if (details.has(name)) details.get(name).open = open;
      const boxes = landmarks(".scroll, pre");
      for (const [name, left, top] of scrolled) boxes.get(name)?.scrollTo(left, top);
      const field = focused && landmarks(fields).get(focused);
      field?.focus({ preventScroll: true });
      if (selection && field?.type === "search") field.setSelectionRange(...selection);
      const now = anchor && document.getElementById(anchor.id);
      if (now && scrollY) scrollBy(0, now.getBoundingClientRect().top - offset);
    };
  }

  async function refresh() {
    const source = place("facts").dataset.source;
    if (!source) return show(JSON.parse(place("facts").textContent));
    const answer = await fetch(source, { headers: { accept: "application/json" } });
    if (answer.ok) return show(await answer.json());
    // What is wrong, in a sentence.
    const { problem } = await answer.json().catch(() => ({}));
    throw new Error(problem ?? `${source}: ${answer.status} ${answer.statusText}`);
  }

  function failed(error) {
    place("main").prepend(element("p", { class: "note", role: "alert" }, `The page cannot be drawn: ${error.message}`));
    console.error(error);
  }

  try { setTheme(THEMES.includes(localStorage.getItem("slurmtrain-theme")) ? localStorage.getItem("slurmtrain-theme") : "auto"); } catch { setTheme("auto"); }
  /* Fulfilled once the page was drawn, or could not be. */
  const ready = new Promise((resolve) => {
    document.addEventListener("DOMContentLoaded", () => refresh().catch(failed).then(resolve));
  });

  return {
    draws: (kind, draw) => { drawers[kind] = draw; },
    refresh, ready, element, section, head, facts, tiles, select, tick, choice, table, numeric, link, chart, legend,
    series, time, state, notes, onNodes, format, known, printable,
  };
})();
