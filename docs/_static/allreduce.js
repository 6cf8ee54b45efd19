// Allreduce schedules: what may be one step, who holds what after it, and what it costs. The
// rules, and the words of what they refuse, are those of d2lpar.schedules; a test compares both.

// A schedule is {chunks, steps}, a step a list of moves {src, dst, first, end, reduce}: src sends
// chunks first to end - 1, as one message, to dst, which adds them to its own or replaces these.

/** Why the moves of a step cannot happen at the same time, or "" if all of them can. */
function checkSteps(steps) {
  for (const [i, step] of steps.entries()) {
    const [sent, written] = [{}, {}];
    for (const move of step) {
      for (let c = move.first; c < move.end; c++) {
        (sent[`chunk ${c} of participant ${move.src}`] ??= []).push(move);
        (written[`chunk ${c} of participant ${move.dst}`] ??= []).push(move);
      }
    }
    for (const [where, moves] of Object.entries(written)) {
      const problem = conflict(sent[where] ?? [], moves, step);
      if (problem) return `in step ${i + 1} ${where} ${problem}`;
    }
  }
  return "";
}

/** Why a chunk cannot be sent and written by these moves of a step, or "". */
function conflict(sent, written, step) {
  const isReduced = written.length === 1 || written.every((move) => move.reduce);
  if (!sent.length) return isReduced ? "" : "arrives more than once, and is not reduced each time: use two steps";
  const [there, back] = [sent[0], written[0]]; // it must be exchanged, and nothing else between
  const [a, b] = [there.src, there.dst];
  const between = step.filter(({ src, dst }) => (src === a && dst === b) || (src === b && dst === a));
  const alone = sent.length === 1 && written.length === 1 && between.length === 2;
  const isBack = back.src === b && back.first === there.first && back.end === there.end;
  const advice = "use two steps, or let two exchange it and nothing else, and both reduce it";
  const isExchange = alone && isBack && there.reduce && back.reduce;
  return isExchange ? "" : `is sent, and the same step changes it: ${advice}`;
}

/** Why a move cannot join the last step under a level's own rules, or "" if it can. */
function levelRefusal({ neighbours, single }, k, step, { src, dst }) {
  const next = (src + 1) % k;
  if (neighbours && dst !== next) return `in this level ${src} sends to ${next} only, its neighbour`;
  if (!single || !step.some((move) => move.src === src || move.dst === dst)) return "";
  return "in this level a device sends at most one message in a step, and takes at most one";
}

/** Who holds whose contribution: [step][participant][chunk] is a sorted list; step 0: the start. */
function holdings({ chunks, steps }, k) {
  const states = [Array.from({ length: k }, (_, r) => Array(chunks).fill([r]))];
  for (const step of steps) {
    const before = states[states.length - 1];
    const after = before.map((held) => held.slice());
    for (const { src, dst, first, end, reduce } of step) {
      for (let c = first; c < end; c++) {
        const both = [...after[dst][c], ...before[src][c]].sort((a, b) => a - b);
        after[dst][c] = reduce ? both : before[src][c];
      }
    }
    states.push(after);
  }
  return states;
}

/** Whether these are the contributions of all, each once. */
const isWhole = (contributions, k) => String(contributions) === String([...Array(k).keys()]);

/** What is still wrong at the end of a schedule, or "" if each has each contribution once. */
function verifyAllreduce(schedule, k) {
  for (const [r, held] of holdings(schedule, k).at(-1).entries())
    for (const [c, contributions] of held.entries()) {
      if (isWhole(contributions, k)) continue;
      const tuple = `(${contributions.join(", ")}${contributions.length === 1 ? "," : ""})`;
      const wanted = `not with those of 0 to ${k - 1}, each once`;
      return `participant ${r} ends with the contributions ${tuple} in chunk ${c}, ${wanted}`;
    }
  return "";
}

/** Bytes that each has sent after each step, and when the step ends: [{sent, seconds}, …]. A
 *  message of n bytes takes alpha + n * beta; the busiest participant ends the step. */
function costs({ chunks, steps }, k, nbytes, alpha = 1e-5, beta = 1e-10) {
  const elements = nbytes / 4; // of four bytes; the first chunks have one more
  const bound = (c) => 4 * (c * Math.floor(elements / chunks) + Math.min(c, elements % chunks));
  const all = [{ sent: Array(k).fill(0), seconds: 0 }];
  for (const step of steps) {
    const sent = all[all.length - 1].sent.slice();
    const [sending, receiving] = [Array(k).fill(0), Array(k).fill(0)];
    for (const { src, dst, first, end } of step) {
      const size = bound(end) - bound(first);
      sent[src] += size;
      sending[src] += alpha + size * beta;
      receiving[dst] += alpha + size * beta;
    }
    all.push({ sent, seconds: all.at(-1).seconds + Math.max(...sending, ...receiving) });
  }
  return all;
}

/** A schedule in Python, as an exercise of chapter 3 takes it: a list of lists of Moves. */
function stepsInPython({ chunks, steps }) {
  const move = ({ src, dst, first, end, reduce }) => {
    const part = end - first > 1 ? `range(${first}, ${end})` : first;
    const chunk = end - first === chunks ? "None" : part;
    return `        Move(${src}, ${dst}, ${chunk}, ${reduce ? "True" : "False"}),\n`;
  };
  const lines = steps.map((step) => `    [\n${step.map(move).join("")}    ],\n`);
  return `steps = [\n${lines.join("")}]\n`;
}

if (typeof module === "object") module.exports = { checkSteps, levelRefusal, holdings, verifyAllreduce, costs, stepsInPython };
