"use strict";
/* What a page that is served does besides: it follows what the server says, and draws itself again when its facts are
no longer the newest ones. A page that nobody sees closes its connection, as browsers have few for a server. */
(() => {
  const events = document.getElementById("facts").dataset.source.replace("/facts/", "/events/");
  const sign = Report.element("p", { id: "live", role: "status" });
  const LOST = "not live: the server does not answer; is 'slurmtrain serve' still running, and the tunnel to it open?";
  const OVER = "not live: this server no longer accepts the page; open the address that 'slurmtrain serve' has printed last";
  let stream = null;
  let newest = null;
  let drawing = false;
  let drawAt = 0;

  function say(state, ...texts) {
    sign.className = state;
    sign.replaceChildren(...texts);
  }

  /* Whether a reader would lose something: text that is selected, or a list or button that is held down. */
  function isBusy() {
    const selection = getSelection();
    const isSelecting = selection.type === "Range" && document.getElementById("main").contains(selection.anchorNode);
    return isSelecting || document.querySelector("button:active, select:focus:active") !== null;
  }

  async function draw() {
    if (drawing || document.documentElement.dataset.revision === newest) return;
    const wait = isBusy() ? 1000 : drawAt - performance.now();
    drawing = true;
    if (wait > 0) await new Promise((resolve) => setTimeout(resolve, wait));
    const began = performance.now();
    let failed = false;
    try {
      if (!isBusy()) await Report.refresh();
    } catch (error) {
      failed = true;
      say("bad", `not live: ${error.message}`);
    }
    // Drawing a large page again and again must not keep the browser busy.
    drawAt = performance.now() + 10 * (performance.now() - began);
    drawing = false;
    // What failed is tried again with the next news.
    if (!failed) draw();
  }

  function hear({ data }) {
    const news = JSON.parse(data);
    newest = news.revision;
    if (news.problems.length) say("warn", "live, but: ", ...news.problems.map((each) => Report.element("span", {}, each)));
    else say("good", "live, ", Report.time(news.as_of));
    draw();
  }

  function follow() {
    stream?.close();
    stream = document.hidden ? null : new EventSource(events);
    if (!stream) return;
    stream.onmessage = hear;
    stream.onerror = ({ target }) => say("bad", target.readyState === EventSource.CLOSED ? OVER : LOST);
  }

  Report.ready.then(() => {
    document.body.append(sign);
    document.addEventListener("visibilitychange", follow);
    follow();
  });
})();
