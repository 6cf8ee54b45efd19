// What the pages with schedules share: marks in SVG, tables, time, addresses, and two base classes.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#117733", "#6699CC", "#882255"];
const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");

/** Add an SVG element to a parent and return it. */
function mark(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

/** The controls of a page, by their data-part: a page has the player's HTML already. */
const partsOf = (root) =>
  Object.fromEntries([...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));

/** An HTML element with a text and a class. */
function element(name, text, style = "") {
  return Object.assign(document.createElement(name), { textContent: text, className: style });
}

/** Write rows into a table's body; the first cell heads its row, and some rows are marked. */
function fill(table, rows, isMarked = () => false) {
  table.tBodies[0].replaceChildren();
  rows.forEach(([head, ...values], i) => {
    const line = table.tBodies[0].insertRow();
    line.className = isMarked(i) ? "chosen" : "";
    line.append(Object.assign(element("th", head), { scope: "row" }));
    line.append(...values.map((value) => element("td", value)));
  });
}

/** Set controls to what the page's address says, such as #schedule=ring&k=8; return the rest. */
function readAddress(parts) {
  const words = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const [name, value] of Object.entries(words)) {
    const known = [...(parts[name]?.options ?? [])].some((option) => option.value === value);
    if (known || parts[name]?.type === "range") parts[name].value = value;
  }
  return words;
}

/** Write the values of controls, and the moment that is shown, into the page's address. */
function writeAddress(controls, words) {
  for (const control of controls) words[control.dataset.part] = control.value;
  history.replaceState(null, "", `#${new URLSearchParams(words)}`);
}

/** Back, Step, Play and a slider over moments 0, 1, …: show(x) draws any x between them. */
class Timeline {
  constructor(parts, show, settled = () => {}) {
    Object.assign(this, { parts, show, settled, x: 0, until: null, frame: 0, loops: false });
    const { back, forward, play, position } = parts;
    position?.addEventListener("input", () => this.go(Number(position.value)));
    back?.addEventListener("click", () => this.go(Math.ceil(this.x) - 1));
    forward?.addEventListener("click", () => this.step());
    play.addEventListener("click", () => (this.isPlaying ? this.go(this.x) : this.play()));
  }

  /** Stop at a moment; `durations` are the ms between each moment and the next. */
  go(x, durations = this.durations) {
    cancelAnimationFrame(this.frame);
    Object.assign(this, { durations, until: null, isPlaying: false });
    this.parts.play.textContent = "Play";
    this.draw(Math.min(Math.max(x, 0), durations.length));
    this.settled();
  }

  draw(x) {
    this.x = x;
    Object.assign(this.parts.position ?? {}, { max: this.durations.length, value: x });
    this.show(x);
  }

  /** Go on to the next moment; if one is on its way, it is reached at once. */
  step() {
    if (this.until !== null) this.go(this.until);
    this.run(Math.min(Math.floor(this.x) + 1, this.durations.length));
  }

  play() {
    if (this.x >= this.durations.length) this.go(0);
    this.isPlaying = true;
    this.parts.play.textContent = "Pause";
    this.run(this.durations.length);
  }

  /** Let time pass until a moment; all at once where motion is not wanted. */
  run(until) {
    if (STILL.matches || this.x >= until) return this.go(until);
    this.until = until;
    let before = performance.now();
    const tick = (now) => {
      const speed = Number(this.parts.speed?.value ?? 1);
      const part = (speed * Math.max(now - before, 0)) / this.durations[Math.floor(this.x)];
      before = now;
      this.draw(Math.min(this.x + part, until));
      if (this.x === until && !this.loops) return this.go(until);
      if (this.x === until) this.x = 0;
      this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }
}

/** What both players share: a schedule, another beside it, one time for both, and an address.
 *  Each has its own plan(name, parts) with `moments`, draw(panel, now), compare() and pace(). */
class Player {
  constructor(root, schedules) {
    Object.assign(this, { root, schedules, parts: partsOf(root) });
    this.controls = [...root.querySelectorAll(".controls [data-part]")];
    for (const input of this.controls) input.addEventListener("input", () => this.choose());
    this.timeline = new Timeline(this.parts, (x) => this.show(x), () => this.settle());
    this.timeline.loops = "autoplay" in root.dataset;
  }

  begin() {
    this.choose(this.controls.length && (Number(readAddress(this.parts).moment) || 0));
    if (this.timeline.loops && !STILL.matches) this.timeline.play();
  }

  nameOf(name) { return this.parts.schedule.querySelector(`[value=${name}]`)?.text ?? name; }

  /** Show what the controls say, at a moment, or where as much of the time has passed as before. */
  choose(moment) {
    const { schedule, beside, panels, panel } = this.parts;
    const names = [schedule.value, beside.value].filter(Boolean);
    panels.replaceChildren(...names.map(() => panel.content.cloneNode(true)));
    this.panels = names.map((name, i) => this.plan(name, partsOf(panels.children[i])));
    const moments = [0, ...this.panels.flatMap((plan) => plan.moments)].sort((a, b) => a - b);
    this.moments = moments.filter((now, i) => !i || now > moments[i - 1] * (1 + 1e-9));
    this.compare();
    const now = this.part * this.moments.at(-1) * (1 + 1e-9);
    this.timeline.go(moment ?? this.moments.findLastIndex((end) => end <= now), this.pace());
  }

  /** Draw all schedules at x: between two moments, time passes evenly. */
  show(x) {
    const i = Math.min(Math.floor(x), this.moments.length - 1);
    const [begin, end] = [this.moments[i], this.moments[i + 1] ?? this.moments[i]];
    this.now = begin + (x - i) * (end - begin);
    this.part = this.now / (this.moments.at(-1) || 1);
    for (const panel of this.panels) this.draw(panel, this.now);
    this.parts.count.textContent = this.timeInWords();
    this.parts.position.setAttribute("aria-valuetext", this.timeInWords());
  }

  settle() {
    if (this.controls.length) writeAddress(this.controls, { moment: Math.floor(this.timeline.x) });
  }
}

/** What both puzzles share: levels, targets, a list that grows as Python, and what is said. Each
 *  has its own empty() state, setUp(), rows() of targets, and draw(), which returns Python. */
class Puzzle {
  constructor(root, levels) {
    Object.assign(this, { levels, parts: partsOf(root), states: [] });
    const { level, again, next, copy, python } = this.parts;
    readAddress(this.parts);
    level.addEventListener("input", () => this.begin());
    again.addEventListener("click", () => {
      delete this.states[level.selectedIndex];
      this.begin();
    });
    copy.addEventListener("click", () => {
      getSelection().selectAllChildren(python); // where the page may not copy, the reader can
      navigator.clipboard?.writeText(python.textContent).then(() => this.say("Copied."));
    });
    next.addEventListener("click", () => {
      level.selectedIndex += 1;
      this.begin();
      root.querySelector("[role=button], .ranks button").focus();
    });
  }

  /** Begin a level, or go on where one left it. */
  begin() {
    const i = this.parts.level.selectedIndex;
    this.level = this.levels[i];
    this.state = this.states[i] ??= this.empty();
    [...this.parts.texts.children].forEach((text, j) => (text.hidden = i !== j));
    writeAddress([this.parts.level], {});
    this.setUp();
    this.update("");
  }

  update(words) {
    const rows = this.rows();
    fill(this.parts.targets, rows, (i) => rows[i][1] > rows[i][2]);
    this.parts.python.textContent = this.draw();
    this.parts.next.hidden = true;
    this.say(words);
  }

  /** Say that the list is complete, and whether it meets the targets. */
  complete(words) {
    const missed = this.rows().find(([, mine, target]) => mine > target);
    const { level, next } = this.parts;
    if (missed) return this.say(`${words}, but a target is missed. ${missed[0]}: ${missed.slice(1).join(", not ")}.`);
    const isLast = level.selectedIndex === this.levels.length - 1;
    const option = level.selectedOptions[0];
    option.text = `${option.text.replace(" ✓", "")} ✓`;
    next.hidden = isLast;
    this.say(`Solved. ${words}.${isLast ? " This was the last level." : ""}`);
  }

  say(words) { this.parts.said.textContent = words; }
}

/** Begin what a page shows: one object for each element of a class, with the page's data. */
function start(Kind, style, data) {
  document.addEventListener("DOMContentLoaded", () => {
    for (const root of document.querySelectorAll(`.${style}`))
      new Kind(root, JSON.parse(document.getElementById(data).textContent)).begin();
  });
}
