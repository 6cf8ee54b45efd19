// The pages of chapter 12: a player that shows when each rank works on which micro-batch, and a
// puzzle in which one gives the ranks their work. The rules are in pipeline.js.

const [LEFT, TOP, ROW, BAR, STRIP] = [54, 6, 50, 26, 14]; // of a chart, in pixels

/** Ranks as rows, passes as bars over time, and a strip, as high as what a rank keeps (of `most`). */
class Chart {
  constructor(svg, spans, { total, most, split, target }) {
    const unit = Math.min(Math.max(620 / total, 16), 40); // pixels; it fits, if numbers still can be read
    Object.assign(this, { svg, unit, total, end: duration(spans), bottom: TOP + ROW * spans.length });
    const [width, height] = [LEFT + unit * total + 12, this.bottom + 24];
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.width = `${width}px`;
    spans.forEach((own, rank) => this.drawRank(own, rank, most, split));
    for (let t = 0; t <= total; t += unit < 30 ? 2 : 1) {
      mark(svg, "path", { d: `M${this.x(t)} ${this.bottom}v5`, class: "tick" });
      mark(svg, "text", { x: this.x(t), y: this.bottom + 18, class: "axis" }, t);
    }
    if (target) mark(svg, "path", { d: `M${this.x(target)} 0V${this.bottom}`, class: "target" });
    this.veil = mark(svg, "rect", { y: 0, height: this.bottom, class: "veil" });
    this.cursor = mark(svg, "path", { class: "cursor" });
  }

  x(t) { return LEFT + t * this.unit; }

  drawRank(own, rank, most, split) {
    const { svg, unit } = this;
    const y = TOP + rank * ROW;
    mark(svg, "text", { x: 0, y: y + 18, class: "rank" }, `rank ${rank}`);
    mark(svg, "rect", { x: LEFT, y, width: unit * this.total, height: BAR, class: "idle" });
    const firstStage = Math.min(...own.map(({ action }) => action.stage));
    for (const { action, start, end } of own) {
      const style = `${action.kind}${action.stage === firstStage ? "" : " second"}`;
      const box = { x: this.x(start) + 0.5, y, width: Math.max((end - start) * unit - 1, 0), height: BAR };
      mark(svg, "rect", { ...box, class: style });
      if (box.width > 7 * `${action.microbatch}`.length)
        mark(svg, "text", { x: box.x + box.width / 2, y: y + 17, class: style }, action.microbatch);
    }
    const floor = y + BAR + STRIP + 3;
    const edges = kept(own, split).map(({ time, count }) => `H${this.x(time)}V${floor - (STRIP * count) / most}`);
    mark(svg, "path", { d: `M${LEFT} ${floor}${edges.join("")}H${this.x(this.end)}V${floor}Z`, class: "kept" });
  }

  /** Veil what is still to come. */
  show(now) {
    const x = this.x(now);
    this.veil.setAttribute("x", x);
    this.veil.setAttribute("width", this.x(this.total) - x);
    this.cursor.setAttribute("d", `M${x} 0V${this.bottom + 4}`);
    this.svg.parentElement.scrollLeft = x - this.svg.parentElement.clientWidth / 2;
  }
}

class PipelinePlayer extends Player {
  /** A schedule for this number of ranks and micro-batches, and its times, if there is one. */
  plan(name, parts) {
    const names = ["ranks", "microbatches", "backward", "weight", "transfer"];
    const [p, m, backward, weight, transfer] = names.map((each) => Number(this.parts[each].value));
    const words = this.schedules[name][`${p},${m}`];
    const title = this.nameOf(name);
    if (!words) return { title, parts, spans: [], most: [], moments: [], words: `needs a multiple of ${p} micro-batches` };
    const v = words[0].stages.length; // stages per rank
    const orders = words.map(({ word, stages }) => spell(word, stages));
    const spans = clock(orders, p * v, { forward: 1 / v, backward: backward / v, weight: weight / v, transfer });
    const [split, moments] = [isSplit(orders), spans.flat().flatMap(({ start, end }) => [start, end])];
    const most = spans.map((own) => mostKept(own, split) / v);
    const found = `${duration(spans)} units, ${(100 * bubble(spans)).toFixed(1)} % idle`;
    return { title, parts, v, split, spans, moments, most, words: found };
  }

  pace() {
    const unit = Math.min(500, 20_000 / this.moments.at(-1)); // ms: at most 20 s in all
    return this.moments.slice(1).map((end, i) => unit * (end - this.moments[i]));
  }

  timeInWords() { return `time ${Number(this.now.toFixed(2))} of ${this.moments.at(-1)}`; }

  row({ title, words, most }) { return [title, words, most.join(", ")]; }

  /** Make the charts, on one scale of time and of memory. */
  layOut() {
    for (const value of this.root.querySelectorAll(".with-value span"))
      value.textContent = value.previousElementSibling.value;
    const total = this.moments.at(-1);
    const most = Math.max(...this.panels.flatMap((plan) => plan.most));
    for (const plan of this.panels) {
      plan.parts.caption.textContent = `${plan.title}: ${plan.words}`;
      const size = { total, most: most * plan.v, split: plan.split };
      plan.chart = new Chart(plan.parts.drawing, plan.spans, size);
    }
  }

  draw({ chart }) { chart.show(this.now); }

  tell({ parts, spans, split, v, most }) {
    const rows = spans.map((own, rank) => {
      const span = own.find(({ start, end }) => start <= this.now && this.now < end);
      const keeps = kept(own, split).findLast(({ time }) => time <= this.now)?.count ?? 0;
      return [rank, span ? `${span.action.kind} ${span.action.microbatch}` : "idle", keeps / v, most[rank]];
    });
    fill(parts.state, rows);
  }
}

/** Give each rank its next pass, which runs as soon as it can; a level has a target. */
class PipelinePuzzle extends Puzzle {
  empty() { return { ranks: this.level.stages.map((stages) => ({ stages, word: "" })) }; }

  setUp() {
    this.split = this.level.letters.includes("W");
    const lines = this.level.stages.map((stages, rank) => {
      const buttons = [...this.level.letters, "⌫"].map((letter) => {
        const style = `${KINDS[letter.toUpperCase()] ?? ""} ${letter === letter.toUpperCase() ? "" : "second"}`;
        return `<button type="button" class="${style}" data-rank="${rank}" data-letter="${letter}"
          aria-label="take back the last pass of rank ${rank}">${letter}</button>`;
      });
      const name = `rank ${rank}, stage${stages[1] ? "s" : ""} ${stages.join(" and ")}`;
      return `<div><span>${name}</span> ${buttons.join(" ")}</div>`;
    });
    this.parts.ranks.innerHTML = lines.join("");
  }

  /** The passes and their times, if all ranks work through their words; a pass takes a tick. */
  spans(ranks = this.state.ranks) {
    const orders = ranks.map(({ word, stages }) => spell(word, stages));
    const costs = { forward: 1, backward: 1, weight: isSplit(orders) ? 1 : 0, transfer: 0 };
    return clock(orders, ranks.flatMap(({ stages }) => stages).length, costs);
  }

  /** Give a rank its next pass, or take back its last one, if all ranks can still run theirs. */
  press({ rank, letter }) {
    if (!letter) return;
    const { word, stages } = this.state.ranks[rank];
    const isBack = letter === "⌫";
    if (isBack && !word) return this.say(`Rank ${rank} has no pass yet.`);
    const action = isBack ? null : spell(word + letter, stages).at(-1);
    if (action?.microbatch === this.level.m) return this.say(`Refused: stage ${action.stage} has run all of these.`);
    const ranks = this.state.ranks.with(rank, { stages, word: isBack ? word.slice(0, -1) : word + letter });
    try {
      this.spans(ranks);
    } catch (error) {
      return this.say(`Refused${isBack ? ", for another pass needs it" : ""}: ${error.message}.`);
    }
    this.state.ranks = ranks;
    this.update(`Rank ${rank}: ${isBack ? "its last pass is taken back" : inWords(action)}.`);
  }

  done() {
    const length = this.level.m * this.level.letters.length;
    return this.state.ranks.every(({ word }) => word.length === length) ? "All micro-batches are done" : "";
  }

  inPython() { return ordersInPython(this.state.ranks); }

  rows() {
    const [{ target }, spans] = [this.level, this.spans()];
    const row = (own, r) => [`Kept by rank ${r}`, mostKept(own, this.split), target.keeps[r]];
    return [["Ticks", duration(spans), target.ticks], ...spans.map(row)];
  }

  draw([[, ticks], ...keeps]) {
    const { target, letters, m } = this.level;
    const total = Math.max(target.ticks, ticks);
    const most = Math.max(...target.keeps, ...keeps.map(([, mine]) => mine));
    const size = { total, most, split: this.split, target: target.ticks };
    new Chart(this.parts.drawing, this.spans(), size).show(ticks);
    this.state.ranks.forEach(({ word, stages }, rank) => {
      const buttons = this.parts.ranks.children[rank].querySelectorAll("button");
      [...letters].forEach((letter, i) => {
        const action = spell(word + letter, stages).at(-1);
        const isOver = action.microbatch === m;
        buttons[i].textContent = isOver ? letter : `${letter}${action.microbatch}`;
        buttons[i].setAttribute("aria-label", inWords(action));
        buttons[i].setAttribute("aria-disabled", isOver);
      });
    });
  }
}

start(PipelinePlayer, "pipeline-player", "pipelines");
start(PipelinePuzzle, "pipeline-puzzle", "pipeline-levels");
