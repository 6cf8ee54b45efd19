// The pipeline player: when each stage works on which micro-batch, how long it idles, and how many
// activations it keeps. The orders of work are the module's, exported into the page
// (tools/website.py); the clock is that of d2lpar.pipeline_schedules.clock.
"use strict";

/** When each pass begins and ends: a stage works in order, when it is free and its input is there.
 *  `orders[stage]` lists i + 1 for the forward pass of micro-batch i and -(i + 1) for backward. */
function predict(orders, forward = 1, backward = 2, transfer = 0) {
  const p = orders.length;
  const [free, next] = [Array(p).fill(0), Array(p).fill(0)];
  const [ends, spans] = [new Map(), []];
  for (let moved = true; moved; ) {
    moved = false;
    orders.forEach((order, stage) => {
      while (next[stage] < order.length) {
        const pass = order[next[stage]];
        const source = stage + (pass > 0 ? -1 : 1);
        const needed = source >= 0 && source < p;
        const came = needed ? ends.get(`${source} ${pass}`) : -transfer;
        if (came === undefined) break;
        const start = Math.max(free[stage], came + transfer);
        const end = start + (pass > 0 ? forward : backward);
        free[stage] = end;
        ends.set(`${stage} ${pass}`, end);
        spans.push({ stage, microbatch: Math.abs(pass) - 1, forward: pass > 0, start, end });
        next[stage]++;
        moved = true;
      }
    });
  }
  return spans.sort((a, b) => a.end - b.end || a.start - b.start);
}

/** The idle part of the stages' time, from the first start to the last end: 0 to 1. */
function bubble(spans) {
  const stages = new Set(spans.map((span) => span.stage)).size;
  const busy = spans.reduce((sum, span) => sum + span.end - span.start, 0);
  return 1 - busy / (stages * duration(spans));
}

const duration = (spans) =>
  Math.max(...spans.map((span) => span.end)) - Math.min(...spans.map((span) => span.start));

/** The most micro-batches whose activations each stage keeps at once. */
function mostLive(orders) {
  return orders.map((order) => {
    let [now, most] = [0, 0];
    for (const pass of order) most = Math.max(most, (now += Math.sign(pass)));
    return most;
  });
}

/** Of how many micro-batches a stage keeps activations at a time: a backward pass frees at its end. */
function liveAt(spans, stage, now) {
  const own = spans.filter((span) => span.stage === stage);
  const begun = own.filter((span) => span.forward && span.start < now).length;
  return begun - own.filter((span) => !span.forward && span.end <= now).length;
}

const NAMES = { sequential: "one after the other", gpipe: "GPipe", one_f_one_b: "1F1B" };

class PipelinePlayer {
  constructor(root, pipelines) {
    Object.assign(this, { root, pipelines, parts: partsOf(root), now: 0, timer: 0 });
    const { schedule, stages, microbatches, backward, position, back, forward, play } = this.parts;
    for (const input of [schedule, stages, microbatches, backward]) input.addEventListener("input", () => this.choose());
    position.addEventListener("input", () => this.show(Number(position.value)));
    back.addEventListener("click", () => this.jump(-1));
    forward.addEventListener("click", () => this.jump(1));
    play.addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    this.choose();
  }

  choose() {
    this.pause();
    const { schedule, stages, microbatches, backward, position } = this.parts;
    const [p, m] = [Number(stages.value), Number(microbatches.value)];
    Object.assign(this, { p, m, ratio: Number(backward.value) });
    this.parts.microbatchesShown.textContent = m;
    this.orders = this.pipelines[schedule.value][`${p},${m}`];
    this.spans = predict(this.orders, 1, this.ratio);
    this.total = duration(this.spans);
    position.max = this.total;
    this.compare();
    this.draw();
    this.show(this.total);
  }

  draw() {
    const svg = this.parts.drawing;
    const [left, top, height] = [64, 8, 34];
    const unit = Math.min(40, 640 / this.total);
    Object.assign(this, { left, unit, bottom: top + height * this.p });
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${left + unit * this.total + 8} ${this.bottom + 28}`);
    for (let s = 0; s < this.p; s++) {
      const y = top + s * height;
      mark(svg, "text", { x: 0, y: y + 20, class: "stage" }, `stage ${s}`);
      mark(svg, "rect", { x: left, y, width: unit * this.total, height: height - 6, class: "idle" });
    }
    for (const { stage, microbatch, forward, start, end } of this.spans) {
      const y = top + stage * height;
      const box = { x: left + start * unit + 0.5, y, width: (end - start) * unit - 1, height: height - 6 };
      mark(svg, "rect", { ...box, class: forward ? "forward" : "backward" });
      if (box.width > 9)
        mark(svg, "text", { x: box.x + box.width / 2, y: y + 19, class: forward ? "forward" : "backward" }, microbatch);
    }
    mark(svg, "text", { x: left, y: this.bottom + 20, class: "axis" }, "0");
    mark(svg, "text", { x: left + unit * this.total, y: this.bottom + 20, class: "axis end" }, this.total);
    this.veil = mark(svg, "rect", { y: 0, height: this.bottom, class: "veil" });
    this.cursor = mark(svg, "path", { class: "cursor" });
  }

  /** Show the pipeline at a time, in units of one forward pass. */
  show(now) {
    this.now = Math.min(Math.max(now, 0), this.total);
    const x = this.left + this.now * this.unit;
    this.veil.setAttribute("x", x);
    this.veil.setAttribute("width", (this.total - this.now) * this.unit);
    this.cursor.setAttribute("d", `M${x} 0V${this.bottom + 6}`);
    const { position, count, state } = this.parts;
    position.value = this.now;
    count.textContent = `time ${Number(this.now.toFixed(1))} of ${this.total}`;
    position.setAttribute("aria-valuetext", count.textContent);
    const rows = this.orders.map((_, s) => {
      const span = this.spans.find((span) => span.stage === s && span.start < this.now && this.now <= span.end);
      const does = span ? `${span.forward ? "forward" : "backward"} ${span.microbatch}` : "idle";
      return [s, this.now ? does : "not started", liveAt(this.spans, s, this.now), mostLive(this.orders)[s]];
    });
    fill(state, rows);
  }

  /** Go to the next or the last moment at which a pass ends. */
  jump(direction) {
    this.pause();
    const moments = [0, ...new Set(this.spans.map((span) => span.end))].sort((a, b) => a - b);
    const later = moments.find((moment) => moment > this.now + 1e-9) ?? this.total;
    const earlier = moments.filter((moment) => moment < this.now - 1e-9).at(-1) ?? 0;
    this.show(direction > 0 ? later : earlier);
  }

  compare() {
    const rows = Object.entries(this.pipelines).map(([name, of]) => {
      const orders = of[`${this.p},${this.m}`];
      const spans = predict(orders, 1, this.ratio);
      const share = `${(100 * bubble(spans)).toFixed(1)} %`;
      return [NAMES[name], duration(spans), share, mostLive(orders).join(", ")];
    });
    fill(this.parts.table, rows, Object.keys(this.pipelines).indexOf(this.parts.schedule.value));
  }

  play() {
    if (this.now >= this.total) this.show(0);
    this.parts.play.textContent = "Pause";
    let last = performance.now();
    const frame = (now) => {
      this.show(this.now + ((now - last) / 1000) * 2); // two units a second
      last = now;
      if (this.now >= this.total) return this.pause();
      this.timer = requestAnimationFrame(frame);
    };
    this.timer = requestAnimationFrame(frame);
  }

  pause() {
    cancelAnimationFrame(this.timer);
    this.timer = 0;
    this.parts.play.textContent = "Play";
  }
}

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    const data = document.getElementById("pipelines");
    for (const root of document.querySelectorAll(".pipeline-player"))
      root.player = new PipelinePlayer(root, JSON.parse(data.textContent));
  });
}
if (typeof module !== "undefined") module.exports = { predict, bubble, mostLive, duration };
