// Pipeline schedules: which are possible, when each pass runs, how long ranks idle, what they keep.
// The rules, and the words, are those of d2lpar.pipeline_schedules; a test compares both.

const KINDS = { F: "forward", B: "backward", W: "weight" };

/** The actions of a word, as in chapter 12: small letters are passes of a rank's second stage. */
function spell(word, stages) {
  const counts = {};
  return [...word].map((letter) => {
    counts[letter] = (counts[letter] ?? 0) + 1;
    const stage = stages[letter === letter.toUpperCase() ? 0 : 1];
    return { stage, microbatch: counts[letter] - 1, kind: KINDS[letter.toUpperCase()] };
  });
}

const inWords = ({ stage, microbatch, kind }) => `${kind} pass of micro-batch ${microbatch} on stage ${stage}`;

/** The action of another stage whose result an action works on, if any. */
function source({ stage, microbatch, kind }, numStages) {
  if (kind === "forward" && stage > 0) return { stage: stage - 1, microbatch, kind };
  if (kind === "backward" && stage < numStages - 1) return { stage: stage + 1, microbatch, kind };
}

/** The actions that must be done before an action. */
function needs(action, numStages) {
  const earlier = { backward: "forward", weight: "backward" }[action.kind];
  const own = earlier && { ...action, kind: earlier };
  return [source(action, numStages), own].filter(Boolean);
}

const isSplit = (orders) => orders.flat().some((action) => action.kind === "weight");

/** The ticks, lists of actions: each rank does its next action if all it needs was done before.
 *  An error says which action waits for which. */
function play(orders, numStages) {
  const [todo, done, ticks] = [orders.map((order) => order.slice()), new Set(), []];
  const lacks = (action) => needs(action, numStages).filter((need) => !done.has(inWords(need)));
  while (todo.some((order) => order.length)) {
    const heads = todo.filter((order) => order.length).map((order) => order[0]);
    const tick = heads.filter((head) => !lacks(head).length);
    if (!tick.length) {
      const last = heads.at(-1);
      throw new Error(`tick ${ticks.length}: ${inWords(last)} waits for ${inWords(lacks(last)[0])}`);
    }
    for (const order of todo) if (tick.includes(order[0])) order.shift();
    for (const action of tick) done.add(inWords(action));
    ticks.push(tick);
  }
  return ticks;
}

/** When each action begins and ends: a list of {action, start, end} per rank. A backward pass
 *  that is not split costs backward + weight; a result reaches another rank transfer later. */
function clock(orders, numStages, { forward, backward, weight, transfer }) {
  const costs = { forward, backward: backward + (isSplit(orders) ? 0 : weight), weight };
  const rankOf = {};
  orders.forEach((order, rank) => order.forEach((action) => (rankOf[action.stage] = rank)));
  const [free, ends, spans] = [orders.map(() => 0), {}, orders.map(() => [])];
  for (const action of play(orders, numStages).flat()) {
    const rank = rankOf[action.stage];
    const sender = source(action, numStages);
    let start = free[rank];
    if (sender) {
      const travel = rankOf[sender.stage] === rank ? 0 : transfer;
      start = Math.max(start, ends[inWords(sender)] + travel);
    }
    const end = start + costs[action.kind];
    free[rank] = ends[inWords(action)] = end;
    spans[rank].push({ action, start, end });
  }
  return spans;
}

const duration = (spans) => Math.max(0, ...spans.flat().map((span) => span.end));

/** The idle part of all ranks' time, 0 to 1. */
function bubble(spans) {
  const busy = spans.flat().reduce((sum, { start, end }) => sum + end - start, 0);
  return 1 - busy / (spans.length * duration(spans));
}

/** How many activations a rank keeps, and since when: a list of {time, count}. Those of a
 *  micro-batch count from the start of its forward pass to the end of the last that needs them. */
function kept(spans, split) {
  const changes = { forward: 1, [split ? "weight" : "backward"]: -1 };
  let count = 0;
  return spans.map(({ action, start, end }) => {
    count += changes[action.kind] ?? 0;
    return { time: action.kind === "forward" ? start : end, count };
  });
}

const mostKept = (spans, split) => Math.max(0, ...kept(spans, split).map(({ count }) => count));

/** Words as an exercise of chapter 12 takes them: a list of actions per rank. */
function ordersInPython(ranks) {
  const lines = ranks.map(({ word, stages }) => `    spell("${word}", ${stages.join(", ")}),\n`);
  return `orders = [\n${lines.join("")}]\n`;
}

if (typeof module === "object") module.exports = { spell, play, clock, duration, bubble, mostKept, ordersInPython };
