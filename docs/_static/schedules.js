// The schedule player: who sends which chunk to whom, step by step, and what everyone holds then.
// It plays the schedules that the module exported into the page (tools/website.py), and needs no
// server. The rules are those of d2lpar.collectives: all messages of a step are taken before any
// is written; in a step the busiest participant decides how long it takes.
"use strict";

// The rules

/** Who holds whose contribution: [step][participant][chunk] is a sorted list; step 0: the start. */
function holdings({ chunks, steps }, k) {
  const own = (r) => Array.from({ length: chunks }, () => [r]);
  const states = [Array.from({ length: k }, (_, r) => own(r))];
  for (const step of steps) {
    const before = states[states.length - 1];
    const after = before.map((held) => held.slice());
    for (const [src, dst, first, end, reduce] of step) {
      for (let c = first; c < end; c++) {
        const both = [...after[dst][c], ...before[src][c]].sort((a, b) => a - b);
        after[dst][c] = reduce ? both : before[src][c];
      }
    }
    states.push(after);
  }
  return states;
}

/** Where each of n chunks ends, in bytes: the first are larger by one element of four bytes. */
function chunkEnds(nbytes, n, itemsize = 4) {
  const elements = nbytes / itemsize;
  const each = Math.floor(elements / n);
  const ends = [0];
  for (let c = 0; c < n; c++) ends.push(ends[c] + (each + (c < elements % n)) * itemsize);
  return ends;
}

/** Bytes that each has sent after each step, and when the step ends: [{sent, seconds}, …]. */
function costs({ chunks, steps }, k, nbytes, alpha = 1e-5, beta = 1e-10) {
  const ends = chunkEnds(nbytes, chunks);
  const all = [{ sent: Array(k).fill(0), seconds: 0 }];
  for (const step of steps) {
    const sent = all[all.length - 1].sent.slice();
    const [sending, receiving] = [Array(k).fill(0), Array(k).fill(0)];
    for (const [src, dst, first, end] of step) {
      const size = ends[end] - ends[first];
      sent[src] += size;
      sending[src] += alpha + size * beta;
      receiving[dst] += alpha + size * beta;
    }
    const seconds = all[all.length - 1].seconds + Math.max(...sending, ...receiving);
    all.push({ sent, seconds });
  }
  return all;
}

// What is drawn and said

/** A number with a unit, three digits long: 1.33 MB. */
function withUnit(value, unit, units) {
  const [factor, prefix] = units.find(([f]) => value >= f) ?? units[units.length - 1];
  return `${value ? Number((value / factor).toPrecision(3)) : 0} ${prefix}${unit}`;
}
const bytes = (n) => withUnit(n, "B", [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]]);
const time = (s) => withUnit(s, "s", [[1, ""], [1e-3, "m"], [1e-6, "µ"]]);

const DISC = 15; // a device's radius
const NAMES_OF_SCHEDULES = { halving_doubling: "halving and doubling", recursive_doubling: "recursive doubling" };

/** The devices on a circle, what each holds, and messages on their way between them. */
class Ring {
  constructor(svg, k, chunks) {
    const cell = Math.min(14, 96 / chunks);
    const row = Math.min(11, 64 / k);
    Object.assign(this, { svg, k, chunks, cell, row, radius: k > 5 ? 126 : 104 });
    const [w, h] = [chunks * cell - 2, k * row];
    this.corners = Array.from({ length: k }, (_, r) => {
      const { x, y } = this.place(r, 1); // outside of the device, and just clear of it
      const distance = this.radius + DISC + 8 + (Math.abs(x) * w) / 2 + (Math.abs(y) * h) / 2;
      return { x: x * distance - w / 2, y: y * distance - h / 2 };
    });
    const [xs, ys] = ["x", "y"].map((axis) => this.corners.map((corner) => corner[axis]));
    const [left, top] = [Math.min(...xs) - 6, Math.min(...ys) - 6];
    const [right, bottom] = [Math.max(...xs) + w + 6, Math.max(...ys) + h + 6];
    svg.setAttribute("viewBox", `${left} ${top} ${right - left} ${bottom - top}`);
    svg.replaceChildren();
    this.arrows = mark(svg, "g", { class: "arrows" });
    this.cells = mark(svg, "g");
    this.packets = mark(svg, "g", { class: "packets" });
    for (let r = 0; r < k; r++) {
      const { x, y } = this.place(r);
      mark(svg, "circle", { cx: x, cy: y, r: DISC, fill: COLOURS[r] });
      mark(svg, "text", { x, y: y + 5, class: "device" }, r);
    }
  }

  place(r, radius = this.radius) {
    const angle = (2 * Math.PI * r) / this.k - Math.PI / 2 - (this.k % 2 ? 0 : Math.PI / this.k);
    return { x: radius * Math.cos(angle), y: radius * Math.sin(angle) };
  }

  /** A square per contribution: a column is a chunk, a row is whose it is; a frame: the whole sum. */
  hold(state) {
    this.cells.replaceChildren();
    const { cell, row, k } = this;
    state.forEach((held, r) => {
      const { x, y } = this.corners[r];
      held.forEach((contributions, c) => {
        const box = { x: x + c * cell, y, width: cell - 2, height: k * row, class: "chunk" };
        if (contributions.length === k) box.class += " whole";
        mark(this.cells, "rect", box);
        for (const who of contributions) {
          const part = { x: box.x, y: y + who * row, width: cell - 2, height: row - 1 };
          mark(this.cells, "rect", { ...part, fill: COLOURS[who] });
        }
      });
    });
  }

  /** The messages of a step, as arrows, and as packets that have come a part of their way. */
  send(step, part) {
    this.arrows.replaceChildren();
    this.packets.replaceChildren();
    for (const [src, dst, first, end, reduce] of step) {
      const [a, b] = [this.place(src), this.place(dst)];
      const [dx, dy] = [b.x - a.x, b.y - a.y];
      const length = Math.hypot(dx, dy);
      const [ux, uy] = [dx / length, dy / length];
      const [px, py] = [-uy * 5, ux * 5]; // beside the line, so that an exchange shows both ways
      const beside = (point, along) => ({ x: point.x + ux * along + px, y: point.y + uy * along + py });
      const [from, to] = [beside(a, DISC + 3), beside(b, -DISC - 6)];
      const path = `M${from.x} ${from.y}L${to.x} ${to.y}`;
      const head = `M${to.x - ux * 6 - uy * 4} ${to.y - uy * 6 + ux * 4}L${to.x} ${to.y}L${to.x - ux * 6 + uy * 4} ${to.y - uy * 6 - ux * 4}`;
      mark(this.arrows, "path", { d: path, class: reduce ? "added" : "copied" });
      mark(this.arrows, "path", { d: head, class: "head" });
      const { x, y } = beside(a, DISC + 13 + (length - 2 * DISC - 32) * part);
      const label = end - first === this.chunks ? "all" : end - first > 1 ? `${first}–${end - 1}` : first;
      const width = 8 + 7 * String(label).length;
      const box = { x: x - width / 2, y: y - 9, width, height: 18, rx: 4, class: reduce ? "added" : "copied" };
      mark(this.packets, "rect", box);
      mark(this.packets, "text", { x, y: y + 4.5 }, label);
    }
  }
}

/** A step in words, as one would read it out. */
function inWords(step, chunks) {
  const parts = step.map(([src, dst, first, end]) => {
    const what = end - first === chunks ? "the whole tensor" : end - first > 1 ? `chunks ${first} to ${end - 1}` : `chunk ${first}`;
    return `${src} sends ${what} to ${dst}`;
  });
  return parts.join("; ");
}

// The player

const STILL = typeof window !== "undefined" && window.matchMedia("(prefers-reduced-motion: reduce)");

class SchedulePlayer {
  constructor(root, schedules) {
    Object.assign(this, { root, schedules, parts: partsOf(root), step: 0, timer: 0 });
    const { schedule, k, size, position, back, forward, play } = this.parts;
    for (const input of [schedule, k, size]) input?.addEventListener("change", () => this.choose());
    position.addEventListener("input", () => this.show(Number(position.value)));
    back.addEventListener("click", () => this.show(this.step - 1));
    forward.addEventListener("click", () => this.advance());
    play.addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    this.choose();
    if ("autoplay" in root.dataset && !STILL.matches) this.play();
  }

  choose() {
    this.pause();
    const { schedule, k, size, position } = this.parts;
    this.name = schedule ? schedule.value : this.root.dataset.schedule;
    this.k = Number(k ? k.value : this.root.dataset.k);
    this.nbytes = Number(size ? size.value : 4e6);
    this.now = this.schedules[this.name][this.k];
    this.states = holdings(this.now, this.k);
    this.ring = new Ring(this.parts.drawing, this.k, this.now.chunks);
    position.max = this.now.steps.length;
    if (this.parts.table) this.compare();
    this.show(0);
  }

  /** Show what is held after so many steps; the arrows are those of the next step. */
  show(step, part = 0) {
    const { steps, chunks } = this.now;
    this.step = Math.min(Math.max(step, 0), steps.length);
    const { position, count, words, sent } = this.parts;
    position.value = this.step;
    this.ring.hold(this.states[this.step]);
    this.ring.send(steps[this.step] ?? [], part);
    count.textContent = `${this.step} of ${steps.length} steps done`;
    position.setAttribute("aria-valuetext", count.textContent);
    if (words) {
      const next = steps[this.step];
      const verb = next?.some(([, , , , reduce]) => reduce) ? "added" : "copied";
      words.textContent = next
        ? `Step ${this.step + 1}: ${inWords(next, chunks)}. What arrives is ${verb}.`
        : "Every device holds the whole sum.";
    }
    if (sent) this.tell(sent);
  }

  /** A row per device: how many of its sums are whole, and how much it has sent. */
  tell(table) {
    const cost = costs(this.now, this.k, this.nbytes)[this.step];
    const rows = this.states[this.step].map((held, r) => {
      const whole = held.filter((contributions) => contributions.length === this.k).length;
      return [r, `${whole} of ${this.now.chunks}`, bytes(cost.sent[r])];
    });
    fill(table, rows);
    this.parts.clock.textContent = time(cost.seconds);
  }

  /** A row per schedule, for this number of devices and this tensor. */
  compare() {
    const rows = Object.entries(this.schedules).map(([name, of]) => {
      const last = costs(of[this.k], this.k, this.nbytes).at(-1);
      return { name, steps: of[this.k].steps.length, most: Math.max(...last.sent), seconds: last.seconds };
    });
    const best = Math.min(...rows.map((row) => row.seconds));
    const cells = rows.map(({ name, steps, most, seconds }) => {
      const mine = seconds < best * 1.001 ? `${time(seconds)}, fastest` : time(seconds);
      return [NAMES_OF_SCHEDULES[name] ?? name, steps, bytes(most), mine];
    });
    fill(this.parts.table, cells, rows.findIndex((row) => row.name === this.name));
  }

  /** Let messages travel: those of one step, or of all that are left. */
  play(once = false) {
    const { steps } = this.now;
    if (this.step === steps.length) this.show(0);
    if (!once) this.parts.play.textContent = "Pause";
    this.parts.words?.setAttribute("aria-live", once ? "polite" : "off");
    const travel = 1100; // ms on the way
    let begin = performance.now() + (once ? 0 : 500); // ms before a message leaves
    const frame = (now) => {
      const part = (now - begin) / travel;
      if (part < 1) this.ring.send(steps[this.step] ?? [], Math.max(part, 0));
      else {
        const over = this.step === steps.length;
        if (over && !("autoplay" in this.root.dataset)) return this.pause();
        this.show(over ? 0 : this.step + 1);
        if (once) return this.pause();
        begin = now + (this.step === steps.length ? 1400 : 500); // to see the end
      }
      this.timer = requestAnimationFrame(frame);
    };
    this.timer = requestAnimationFrame(frame);
  }

  /** Take one step, at once where motion is not wanted. */
  advance() {
    const waiting = Boolean(this.timer); // a second click does not wait for the messages
    this.pause();
    if (waiting || STILL.matches) this.show(this.step + 1);
    else if (this.step < this.now.steps.length) this.play(true);
  }

  pause() {
    cancelAnimationFrame(this.timer);
    this.timer = 0;
    this.parts.play.textContent = "Play";
    if (this.ring) this.show(this.step);
  }
}

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    const data = document.getElementById("schedules");
    for (const root of document.querySelectorAll(".schedule-player"))
      root.player = new SchedulePlayer(root, JSON.parse(data.textContent));
  });
}
if (typeof module !== "undefined") module.exports = { holdings, costs, bytes, time };
