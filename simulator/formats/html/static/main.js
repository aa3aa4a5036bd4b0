// What happens once the page stands.

const DRAW = {
  memory: drawMemory,
  interval: drawInterval,
  time: drawTime,
  timeline: drawTimeline,
  pipeline: drawPipeline,
  matrix: drawMatrix,
  node: drawNode,
  record: drawRecord,
};
if (typeof drawWhatIf !== "undefined") DRAW.whatif = drawWhatIf;
if (typeof drawLive !== "undefined") DRAW.live = drawLive;

const NUMBERS = new Numbers();
for (const one of document.querySelectorAll("[data-colour]")) one.style.background = colour(one.dataset.colour);
for (const one of document.querySelectorAll("table.sortable")) sortable(one);
for (const one of document.querySelectorAll(".scroll")) edged(one);
for (const one of document.querySelectorAll("[data-draw]")) DRAW[one.dataset.draw](one);
for (const one of document.querySelectorAll("[data-chart]")) drawChart(one);
NUMBERS.open(document);

const switcher = document.getElementById("theme"),
  root = document.documentElement;
const named = () => {
  switcher.textContent = root.dataset.theme === "dark" ? "Light" : "Dark";
  switcher.setAttribute("aria-label", `Use the ${switcher.textContent.toLowerCase()} theme`);
};
switcher.hidden = false;
named();
switcher.addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("shardwise-theme", root.dataset.theme);
  } catch {
    /* a file may have no storage */
  }
  named();
});

const toc = document.querySelector(".toc ol");
for (const section of document.querySelectorAll("main section[id]")) {
  const title = section.dataset.short || section.querySelector("h2")?.textContent || "Answer";
  toc.append(el("li", {}, el("a", { href: `#${section.id}` }, title)));
}
const links = new Map([...document.querySelectorAll(".toc a")].map((one) => [one.getAttribute("href").slice(1), one]));
const watch = new IntersectionObserver(
  (entries) => {
    for (const one of entries)
      if (one.isIntersecting) {
        links.forEach((link) => link.classList.remove("here"));
        links.get(one.target.id).classList.add("here");
      }
  },
  { rootMargin: "-20% 0px -70% 0px" },
);
for (const id of links.keys()) {
  const section = document.getElementById(id);
  if (section) watch.observe(section);
}
document.documentElement.dataset.ready = "yes";
