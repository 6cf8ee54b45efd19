// The pages of chapter 3: a player, which shows who sends which chunk to whom and what all hold
// then, and a puzzle, in which one places these moves. The rules are in allreduce.js.

/** A number with a unit, three digits long: 1.33 MB. */
function withUnit(value, unit, units) {
  const [factor, prefix] = units.find(([f]) => value >= f) ?? units[units.length - 1];
  return `${Number((value / factor).toPrecision(3))} ${prefix}${unit}`;
}
const bytes = (n) => withUnit(n, "B", [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]]);
const time = (s) => withUnit(s, "s", [[1, ""], [1e-3, "m"], [1e-6, "µ"]]);

function chunksInWords({ first, end }, chunks) {
  if (end - first === chunks) return "the whole tensor";
  return end - first > 1 ? `chunks ${first}–${end - 1}` : `chunk ${first}`;
}

const DISC = 15; // a device's radius

/** The devices on a circle, what each holds, and messages on their way between them. */
class Board {
  constructor(svg, k, chunks, size = 20) {
    const cell = chunks === 1 ? 2 * size : Math.min(size, 120 / chunks);
    const row = Math.min(12, 64 / k);
    Object.assign(this, { k, chunks, cell, row, radius: k > 5 ? 126 : 104 });
    const [w, h] = [chunks * cell - 2, k * row + 14]; // with the chunks' numbers
    this.corners = Array.from({ length: k }, (_, r) => {
      const { x, y } = this.place(r, 1); // outside of the device, and just clear of it
      const distance = this.radius + DISC + 8 + (Math.abs(x) * w) / 2 + (Math.abs(y) * h) / 2;
      return { x: x * distance - w / 2, y: y * distance - h / 2 + 14 };
    });
    const [xs, ys] = ["x", "y"].map((axis) => this.corners.map((corner) => corner[axis]));
    const [left, top] = [Math.min(...xs) - 6, Math.min(...ys) - 18];
    const [right, bottom] = [Math.max(...xs) + w + 6, Math.max(...ys) + h - 8];
    svg.setAttribute("viewBox", `${left} ${top} ${right - left} ${bottom - top}`);
    svg.style.minWidth = `${0.65 * (right - left)}px`;
    svg.replaceChildren();
    for (const name of ["arrows", "cells", "packets", "heads"]) this[name] = mark(svg, "g", { class: name });
    for (let r = 0; r < k; r++) {
      const { x, y } = this.place(r);
      mark(svg, "circle", { cx: x, cy: y, r: DISC, fill: COLOURS[r] });
      mark(svg, "text", { x, y: y + 6.5, class: "device" }, r);
      for (let c = 0; c < chunks && chunks > 1; c++)
        mark(svg, "text", { x: this.corners[r].x + (c + 0.5) * cell - 1, y: this.corners[r].y - 4, class: "number" }, c);
    }
  }

  place(r, radius = this.radius) {
    const angle = (2 * Math.PI * r) / this.k - Math.PI / 2 - (this.k % 2 ? 0 : Math.PI / this.k);
    return { x: radius * Math.cos(angle), y: radius * Math.sin(angle) };
  }

  box(r, c) {
    const { x, y } = this.corners[r];
    return { x: x + c * this.cell, y, width: this.cell - 2, height: this.k * this.row };
  }

  /** A square per contribution: a column is a chunk, a row is whose it is; a frame: the whole sum. */
  hold(state) {
    this.cells.replaceChildren();
    for (const [r, held] of state.entries())
      for (const [c, contributions] of held.entries()) {
        const box = this.box(r, c);
        mark(this.cells, "rect", { ...box, class: isWhole(contributions, this.k) ? "chunk whole" : "chunk" });
        for (const who of new Set(contributions)) {
          const y = box.y + who * this.row;
          mark(this.cells, "rect", { ...box, y, height: this.row - 1, fill: COLOURS[who] });
          const times = contributions.filter((other) => other === who).length;
          if (times > 1)
            mark(this.cells, "text", { x: box.x + box.width / 2, y: y + this.row - 2, class: "twice" }, `×${times}`);
        }
      }
  }

  /** The messages of a step, as arrows, and as packets that have come a part of their way. */
  send(step, fraction) {
    for (const layer of [this.arrows, this.packets, this.heads]) layer.replaceChildren();
    for (const move of step) this.sendOne(move, fraction, step.length > 3 * this.k);
  }

  sendOne({ src, dst, first, end, reduce }, fraction, isCrowded) {
    const [a, b, style] = [this.place(src), this.place(dst), reduce ? "added" : "copied"];
    const length = Math.hypot(b.x - a.x, b.y - a.y);
    const [ux, uy] = [(b.x - a.x) / length, (b.y - a.y) / length];
    // 5 beside the line, so that an exchange shows both ways
    const along = (d, s = 0) => ({ x: a.x + ux * d - uy * (5 + s), y: a.y + uy * d + ux * (5 + s) });
    const line = (points) => `M${points.map(({ x, y }) => `${x} ${y}`).join("L")}`;
    const tip = length - DISC - 4;
    mark(this.arrows, "path", { d: line([along(DISC + 3), along(tip)]), class: style });
    const label = end - first === this.chunks ? "all" : end - first > 1 ? `${first}–${end - 1}` : `${first}`;
    const width = isCrowded ? 8 : 8 + 7 * label.length;
    const reach = (Math.abs(ux) * width) / 2 + Math.abs(uy) * (isCrowded ? 4 : 9);
    const { x, y } = along(DISC + 4 + reach + (tip - DISC - 12 - 2 * reach) * fraction);
    if (isCrowded) return mark(this.packets, "circle", { cx: x, cy: y, r: 4, class: style });
    mark(this.packets, "rect", { x: x - width / 2, y: y - 9, width, height: 18, rx: 4, class: style });
    mark(this.packets, "text", { x, y: y + 4.5 }, label);
    mark(this.heads, "path", { d: line([along(tip - 7, -4), along(tip), along(tip - 7, 4)]) });
  }
}

/** A step in words, as one would read it out. */
function stepInWords(step, chunks) {
  const how = step.some((move) => move.reduce) ? "is added" : "replaces what is there";
  const parts = step.map((move) => `device ${move.src} sends ${chunksInWords(move, chunks)} to ${move.dst}`);
  const many = `${step.length} messages at the same time`;
  return `${step.length > 8 ? many : parts.join("; ")}. What arrives ${how}.`;
}

class SchedulePlayer extends Player {
  plan(name, parts) {
    const [k, ...rest] = ["k", "size", "alpha", "beta"].map((each) => Number(this.parts[each].value));
    const schedule = this.schedules[name][k];
    const cost = costs(schedule, k, ...rest);
    const board = parts.drawing && new Board(parts.drawing, k, schedule.chunks);
    const moments = cost.map(({ seconds }) => seconds);
    return { title: this.nameOf(name), parts, k, schedule, cost, board, moments, states: holdings(schedule, k) };
  }

  row({ title, cost }) {
    return [title, cost.length - 1, bytes(Math.max(...cost.at(-1).sent)), time(cost.at(-1).seconds)];
  }

  pace() { return this.moments.slice(1).map(() => 1500); }

  timeInWords() { return time(this.now); }

  draw(panel) {
    const { board, moments, states, schedule } = panel;
    const step = moments.findLastIndex((moment) => moment <= this.now * (1 + 1e-9));
    const travelled = (this.now - moments[step]) / (moments[step + 1] - moments[step] || 1);
    if (step !== panel.step) board.hold(states[step]);
    board.send(schedule.steps[step] ?? [], Math.max(travelled - 0.2, 0) / 0.8); // one reads it before it leaves
    panel.step = step;
  }

  tell({ parts, title, step, schedule, states, cost, k }) {
    const { steps, chunks } = schedule;
    parts.caption.textContent = `${title}: ${step} of ${steps.length} steps done`;
    if (!parts.words) return;
    parts.words.setAttribute("aria-live", this.timeline.state === "playing" ? "off" : "polite");
    const next = steps[step] && `Step ${step + 1}: ${stepInWords(steps[step], chunks)}`;
    parts.words.textContent = next ?? "Every device holds the whole sum.";
    const rows = states[step].map((held, r) => {
      const sums = held.filter((contributions) => isWhole(contributions, k)).length;
      return [r, `${sums} of ${chunks}`, bytes(cost[step].sent[r])];
    });
    fill(parts.sent, rows);
  }
}

/** Place the moves of an allreduce: a chunk, then who takes it. A step runs when it has its moves. */
class AllreducePuzzle extends Puzzle {
  constructor(root, levels) {
    super(root, levels);
    this.parts.run.addEventListener("click", () => this.runStep());
    this.parts.undo.addEventListener("click", () => this.undo());
    this.parts.board.addEventListener("keydown", (event) => this.pressKey(event));
    this.timeline = new Timeline(this.parts, (x) => this.show(x));
  }

  empty() { return { steps: [], open: [] }; } // the steps that have run, and the moves of the next

  setUp() {
    const { k, chunks } = this.level;
    this.chosen = null;
    this.board = new Board(this.parts.board, k, chunks, 24);
    this.targets = mark(this.parts.board, "g", { class: "targets" });
    for (let r = 0; r < k; r++) {
      const { x, y } = this.board.place(r);
      const style = { role: "button", tabindex: 0, "data-r": r };
      mark(this.targets, "circle", { ...style, cx: x, cy: y, r: DISC, "aria-label": `device ${r}` });
      for (let c = 0; c < chunks; c++) {
        const label = `${chunksInWords({ first: c, end: c + 1 }, chunks)} of device ${r}`;
        mark(this.targets, "rect", { ...style, ...this.board.box(r, c), "aria-label": label, "data-c": c });
      }
    }
    this.parts.add.checked = true;
  }

  /** Enter and Space press; left and right lead to the next target, up and down to a device. */
  pressKey(event) {
    const [targets, device] = [[...this.targets.children], this.level.chunks + 1];
    const ways = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -device, ArrowDown: device, Enter: 0, " ": 0 };
    if (!(event.key in ways) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    if (ways[event.key]) targets.at((targets.indexOf(event.target) + ways[event.key]) % targets.length).focus();
    else event.target.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  }

  /** A press chooses a chunk, more chunks of the same device, or none again; on another device it sends. */
  press(data) {
    const { chosen } = this;
    const [r, c] = [Number(data.r), Number(data.c)]; // c is NaN for a device
    if (data.r === undefined) return;
    if (chosen && r !== chosen.src) return this.send(r);
    if (!data.c) return this.say(chosen ? "Now press another device." : "First press a chunk.");
    const [first, end] = [Math.min(chosen?.first ?? c, c), Math.max(chosen?.end ?? 0, c + 1)];
    const isSame = first === chosen?.first && end === chosen.end;
    this.chosen = isSame ? null : { src: r, first, end };
    const what = chunksInWords({ first, end }, this.level.chunks);
    this.update("");
    this.say(isSame ? "Nothing is chosen." : `Device ${r} sends ${what}. Now press the device that takes it.`);
  }

  send(dst) {
    const [{ k, chunks }, { steps, open }, { chosen }] = [this.level, this.state, this];
    const move = { ...chosen, dst, reduce: this.parts.add.checked };
    this.chosen = null;
    const why = levelRefusal(this.level, k, open, move) || checkSteps([...steps, [...open, move]]);
    if (!why) open.push(move);
    const how = move.reduce ? "It is added." : "It replaces what is there.";
    const words = `Device ${move.src} sends ${chunksInWords(move, chunks)} to device ${dst}. ${how}`;
    this.update("");
    this.say(why ? `Refused, nothing is placed: ${why}.` : words);
  }

  runStep() {
    const [{ k, chunks, target }, { steps, open }] = [this.level, this.state];
    if (!open.length) return this.say("This step has no moves yet: press a chunk, then a device.");
    steps.push(open);
    this.state.open = [];
    const whole = holdings(this.schedule, k).at(-1).flat().filter((held) => isWhole(held, k)).length;
    const soFar = `Step ${steps.length} has run: ${whole} of ${k * chunks} sums are whole.`;
    this.update(steps.length < target.steps ? soFar : `Not yet: ${verifyAllreduce(this.schedule, k)}.`);
    this.timeline.go(steps.length - 1);
    this.timeline.run("stepping", steps.length);
  }

  done() {
    const isRun = this.state.steps.length && !this.state.open.length;
    return isRun && !verifyAllreduce(this.schedule, this.level.k) ? "Every device has the whole sum" : "";
  }

  /** Take back the last move; or open the last step again. */
  undo() {
    const { steps, open } = this.state;
    this.chosen = null;
    const last = open.pop();
    if (last) return this.update(`Taken back: ${chunksInWords(last, this.level.chunks)} of device ${last.src}.`);
    if (!steps.length) return this.update("Nothing is placed.");
    this.state.open = steps.pop();
    this.update(`Step ${steps.length + 1} is open again.`);
  }

  get schedule() {
    const { steps, open } = this.state;
    return { chunks: this.level.chunks, steps: [...steps, open].filter((step) => step.length) };
  }

  inPython() { return stepsInPython(this.schedule); }

  rows() {
    const [{ k, chunks, target }, { steps }] = [this.level, this.schedule];
    const most = Math.max(...costs(this.schedule, k, 4 * chunks).at(-1).sent) / 4;
    const unit = chunks === 1 ? "in tensors" : `in chunks (a tensor has ${chunks})`;
    return [
      ["Steps", steps.length, target.steps],
      ["Messages", steps.flat().length, target.messages],
      [`Sent by the busiest device, ${unit}`, most, target.busiest],
    ];
  }

  draw() {
    const [{ steps }, { chosen }] = [this.state, this];
    this.parts.run.textContent = `Run step ${steps.length + 1}`;
    this.timeline.go(steps.length, steps.map(() => 1000));
    const state = holdings({ ...this.schedule, steps }, this.level.k).at(-1);
    for (const target of this.targets.querySelectorAll("[data-c]")) {
      const [r, c] = [Number(target.dataset.r), Number(target.dataset.c)];
      target.setAttribute("aria-pressed", r === chosen?.src && chosen.first <= c && c < chosen.end);
      target.setAttribute("aria-description", `holds the contributions of ${state[r][c].join(", ")}`);
    }
  }

  /** Show the steps that have run; at the end, the moves of the open step wait. */
  show(x) {
    const [i, { steps, open }] = [Math.floor(x), this.state];
    this.board.hold(holdings({ ...this.schedule, steps }, this.level.k)[i]);
    this.board.send(steps[i] ?? open, x - i);
  }
}

start(SchedulePlayer, "schedule-player", "schedules");
start(AllreducePuzzle, "allreduce-puzzle", "allreduce-levels");
