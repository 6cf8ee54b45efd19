// The theme's arrow beside "Exercises" in the sidebar has no name that could be read out.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  for (const summary of document.querySelectorAll(".bd-sidebar-primary li summary"))
    summary.setAttribute("aria-label", `Pages under ${summary.closest("li").querySelector("a").textContent.trim()}`);
});
