// What the pages with schedules share: marks in SVG, tables, time, addresses, and two base classes.

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#806000", "#6699CC", "#882255"];
const noMotion = window.matchMedia("(prefers-reduced-motion: reduce)");

/** Add an SVG element to a parent and return it. */
function mark(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
  return made;
}

/** The controls and other parts of a page, by their data-part. */
const partsOf = (root) =>
  Object.fromEntries([...root.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));

/** Write rows into a table's body; the first cell heads its row, and some rows are marked. */
function fill(table, rows, isMarked = () => false) {
  const lines = rows.map(([head, ...values], i) => {
    const cells = values.map((value) => `<td>${value}</td>`).join("");
    return `<tr class="${isMarked(i) ? "chosen" : ""}"><th scope="row">${head}</th>${cells}</tr>`;
  });
  table.tBodies[0].innerHTML = lines.join("");
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
  constructor(parts, show, loops = false) {
    Object.assign(this, { parts, show, loops, x: 0, state: "still", until: 0, frame: 0, settled: () => {} });
    const { back, forward, play, position } = parts;
    position?.addEventListener("input", () => this.go(Number(position.value)));
    back?.addEventListener("click", () => this.go(Math.ceil(this.x) - 1));
    forward?.addEventListener("click", () => this.step());
    play.addEventListener("click", () => (this.state === "playing" ? this.go(this.x) : this.play()));
  }

  /** Be still at a moment; `durations` are the ms between each moment and the next. */
  go(x, durations = this.durations) {
    cancelAnimationFrame(this.frame);
    Object.assign(this, { durations, state: "still" });
    this.parts.play.textContent = "Play";
    this.draw(Math.min(Math.max(x, 0), durations.length));
    this.settled();
  }

  draw(x) {
    this.x = x;
    Object.assign(this.parts.position ?? {}, { max: this.durations.length, value: x });
    this.show(x);
  }

  /** Go on to the next moment; if a step is on its way, it is made at once. */
  step() {
    if (this.state === "stepping") this.go(this.until);
    this.run("stepping", Math.min(Math.floor(this.x) + 1, this.durations.length));
  }

  play() {
    if (this.x >= this.durations.length) this.go(0);
    this.run("playing", this.durations.length);
  }

  /** Let time pass until a moment; all at once where motion is not wanted. */
  run(state, until) {
    if (noMotion.matches || this.x >= until) return this.go(until);
    cancelAnimationFrame(this.frame);
    Object.assign(this, { state, until });
    this.parts.play.textContent = state === "playing" ? "Pause" : "Play";
    let before = performance.now();
    const tick = (now) => {
      this.frame = requestAnimationFrame(tick);
      if (now < before) return;
      if (this.x === until) this.x = 0; // again
      const speed = Number(this.parts.speed?.value ?? 1);
      const passed = (speed * (now - before)) / this.durations[Math.floor(this.x)];
      before = now;
      this.draw(Math.min(this.x + passed, until));
      if (this.x < until) return;
      if (state === "stepping" || !this.loops) return this.go(until);
      before = now + 1500; // time to see the end
    };
    this.frame = requestAnimationFrame(tick);
  }
}

/** What both players share: a schedule, another beside it, one time for both, and an address.
 *  Each has its own plan(name, parts) with `title` and `moments`, row() of a table, pace(), draw() for each
 *  frame, tell() for each moment, timeInWords(), and layOut() where panels share a scale. */
class Player {
  constructor(root, schedules) {
    Object.assign(this, { root, schedules, parts: partsOf(root), now: 0 });
    this.controls = [...root.querySelectorAll(".controls [data-part]")];
    for (const input of this.controls) input.addEventListener("input", () => this.choose());
    this.timeline = new Timeline(this.parts, (x) => this.show(x), "autoplay" in root.dataset);
  }

  begin({ moment }) {
    this.choose();
    this.timeline.go(Number(moment) || 0);
    if (this.controls.length) this.timeline.settled = () => this.keepAddress();
    if (this.timeline.loops && !noMotion.matches) this.timeline.play();
  }

  keepAddress() { writeAddress(this.controls, { moment: Math.floor(this.timeline.x) }); }
  nameOf(name) { return this.parts.schedule.querySelector(`[value=${name}]`)?.text ?? name; }

  /** Show what the controls say, at the time that was shown before. */
  choose() {
    const [{ schedule, beside, panels, panel }, { now }] = [this.parts, this];
    const names = [schedule.value, beside.value].filter(Boolean);
    panels.replaceChildren(...names.map(() => panel.content.cloneNode(true)));
    this.panels = names.map((name, i) => this.plan(name, partsOf(panels.children[i])));
    const moments = [0, ...this.panels.flatMap((plan) => plan.moments)].sort((a, b) => a - b);
    this.moments = moments.filter((end, i) => !i || end > moments[i - 1] * (1 + 1e-9));
    const isShown = (title) => this.panels.some((panel) => panel.title === title);
    const rows = Object.keys(this.schedules).map((name) => this.row(this.plan(name, {})));
    if (this.parts.table) fill(this.parts.table, rows, (i) => isShown(rows[i][0]));
    this.layOut?.();
    this.told = null;
    this.timeline.go(this.moments.findLastIndex((end) => end <= now * (1 + 1e-9)), this.pace());
    this.now = now; // only the reader's own steps change it
  }

  /** Draw all schedules at x, between two moments; at each moment say what they do. */
  show(x) {
    const i = Math.min(Math.floor(x), this.moments.length - 1);
    const [begin, end] = [this.moments[i], this.moments[i + 1] ?? this.moments[i]];
    this.now = begin + (x - i) * (end - begin);
    for (const panel of this.panels) this.draw(panel);
    this.parts.count.setAttribute("aria-live", this.timeline.state === "still" ? "polite" : "off");
    this.parts.count.textContent = this.timeInWords();
    this.parts.position.setAttribute("aria-valuetext", this.timeInWords());
    if (this.told !== i) for (const panel of this.panels) this.tell(panel);
    this.told = i;
  }
}

let memory = {}; // where puzzles are kept; in the browser, unless the page is in a sandbox
try { memory = localStorage; } catch {}

/** What both puzzles share: levels, targets, a list that grows as Python, and what is said. Each has
 *  its own empty() state, setUp(), press(), rows() of targets, draw(rows), inPython(), done() in words. */
class Puzzle {
  constructor(root, levels) {
    this.key = JSON.stringify(levels); // other levels, another memory
    Object.assign(this, { levels, parts: partsOf(root), states: JSON.parse(memory[this.key] ?? "[]") });
    const { level, again, next, copy, python } = this.parts;
    root.addEventListener("click", ({ target }) => this.press(target.dataset));
    level.addEventListener("input", () => this.begin());
    again.addEventListener("click", () => this.begin({ again: true }));
    copy.addEventListener("click", () => {
      this.say("Select the list below, and copy it."); // where the page may not
      navigator.clipboard?.writeText(python.textContent).then(() => this.say("Copied."), () => {});
    });
    next.addEventListener("click", () => {
      level.selectedIndex += 1;
      this.begin();
      root.querySelector("[role=button], .ranks button").focus();
    });
  }

  /** Begin a level again, or go on where one left it. */
  begin({ again = false } = {}) {
    const i = this.parts.level.selectedIndex;
    if (again) delete this.states[i];
    if (this.level) writeAddress([this.parts.level], {});
    this.level = this.levels[i];
    this.state = this.states[i] ??= this.empty();
    [...this.parts.texts.children].forEach((text, j) => (text.hidden = i !== j));
    this.setUp();
    this.update("");
  }

  /** Show the state, and say something; where the list is complete, whether it is good. */
  update(words) {
    const { level, next, targets, python } = this.parts;
    const [rows, done] = [this.rows(), this.done()];
    const missed = rows.filter(([, mine, target]) => mine > target);
    fill(targets, rows, (i) => missed.includes(rows[i]));
    python.textContent = this.inPython();
    this.draw(rows);
    const isSolved = done !== "" && !missed.length;
    next.hidden = !isSolved || level.selectedIndex === this.levels.length - 1;
    this.state.isSolved ||= isSolved;
    for (const [i, option] of [...level.options].entries())
      option.text = option.text.replace(" ✓", "") + (this.states[i]?.isSolved ? " ✓" : "");
    const over = missed.map(([name, mine, target]) => `${name.toLowerCase()} (${mine}, not ${target})`);
    const verdict = isSolved ? `Solved. ${done}.` : `${done}, but not within the target: ${over.join("; ")}.`;
    this.say(done ? verdict : words);
    memory[this.key] = JSON.stringify(this.states);
  }

  say(words) { this.parts.said.textContent = words; }
}

/** Begin what a page shows, and again when an address is pasted: an object for each root. */
function start(Kind, className, data) {
  document.addEventListener("DOMContentLoaded", () => {
    for (const root of document.querySelectorAll(`.${className}`)) {
      const made = new Kind(root, JSON.parse(document.getElementById(data).textContent));
      const begin = () => made.begin(readAddress(made.parts));
      addEventListener("hashchange", () => location.hash.includes("=") && begin());
      begin();
    }
  });
}
