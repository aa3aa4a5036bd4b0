// Before the first paint: the theme that was chosen last, else the system's.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("shardwise-theme");
  } catch {
    /* a file may have no storage */
  }
  if (chosen !== "light" && chosen !== "dark")
    chosen = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = chosen;
  if (window.parent !== window) document.documentElement.dataset.framed = "yes"; // inside the live page, which has a head
})();
