// What both players use: marks in SVG, rows of a table, and the parts of a page.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288", "#117733", "#6699CC", "#882255"];

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

/** Write rows into a table's body; the first cell heads its row, and one row may be marked. */
function fill(table, rows, marked = -1) {
  const body = table.tBodies[0];
  body.replaceChildren();
  rows.forEach((row, i) => {
    const line = body.insertRow();
    line.classList.toggle("chosen", i === marked);
    row.forEach((value, j) => {
      const cell = document.createElement(j ? "td" : "th");
      if (!j) cell.scope = "row";
      cell.textContent = value;
      line.append(cell);
    });
  });
}
