"use strict";
/* What a page that is served does besides: it follows what the server says, and draws itself again when its facts are
no longer the newest ones. A page that nobody sees closes its connection, as browsers have few for a server. */
(() => {
  const events = document.getElementById("facts").dataset.source.replace("/facts/", "/events/");
  const sign = Report.element("p", { id: "live", role: "status" }, "reading runs ...");
  const LOST = "not live: the server does not answer; is 'slurmtrain serve' still running, and the tunnel to it open?";
  const OVER = "not live: this server no longer accepts the page; open the address that 'slurmtrain serve' has printed last";
  // How often it is looked whether the reader is done.
  const PAUSE_MS = 500;
  let stream = null;
  let news = null;
  let isDrawing = false;
  let drawAt = 0;

  function say(state, ...texts) {
    sign.className = state;
    sign.replaceChildren(...texts);
  }

  function sayNews() {
    if (news.problems.length) say("warn", "live, but: ", ...news.problems.map((each) => Report.element("span", {}, each)));
    else say("good", "live, ", Report.time(news.as_of));
  }

  function sayBroken() {
    say("bad", stream?.readyState === EventSource.CLOSED ? OVER : LOST);
  }

  /* Whether a reader would lose something: text that is selected, or a list or button that is held down. */
  function isBusy() {
    const selection = getSelection();
    const isSelecting = selection.type === "Range" && document.getElementById("main").contains(selection.anchorNode);
    return isSelecting || document.querySelector("button:active, select:focus:active") !== null;
  }

  const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));

  /* Draws the page until it has the newest facts; what fails is tried again with the next news. */
  async function draw() {
    if (isDrawing) return;
    isDrawing = true;
    try {
      while (document.documentElement.dataset.revision !== news.revision) {
        await pause(Math.max(0, drawAt - performance.now()));
        while (isBusy()) {
          say("warn", "there are newer facts; they are shown once no text is selected");
          await pause(PAUSE_MS);
        }
        const began = performance.now();
        await Report.refresh();
        // Drawing a large page again and again must not keep the browser busy.
        drawAt = performance.now() + 10 * (performance.now() - began);
        sayNews();
      }
    } catch (error) {
      // Without the server, the fetch fails too, with words that help nobody.
      if (!stream || stream.readyState === EventSource.OPEN) say("bad", `not live: ${error.message}`);
      else sayBroken();
    }
    isDrawing = false;
  }

  function hear({ data }) {
    news = JSON.parse(data);
    if (!isDrawing) sayNews();
    draw();
  }

  function follow() {
    stream?.close();
    stream = document.hidden ? null : new EventSource(events);
    if (!stream) return;
    stream.onmessage = hear;
    stream.onerror = sayBroken;
  }

  document.addEventListener("DOMContentLoaded", () => document.body.append(sign));
  Report.ready.then(() => {
    document.addEventListener("visibilitychange", follow);
    follow();
  });
})();
