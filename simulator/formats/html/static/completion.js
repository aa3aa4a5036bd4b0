// Completion in the editor: a listbox below it, moved through by keys, with what each offer means.

class Completion {
  // changed: called when an offer was taken.
  constructor(area, list, about, words_, changed) {
    Object.assign(this, { area, list, about, words: words_, changed, found: [], pick: 0, at: null });
    area.addEventListener("input", () => this.open());
    area.addEventListener("blur", () => this.close());
    area.addEventListener("keydown", (event) => this.pressed(event));
  }

  open() {
    const { area } = this;
    this.at = placeAt(area.value, area.selectionStart);
    this.found = area.selectionStart === area.selectionEnd ? offersAt(this.words, this.at) : [];
    if (this.found.length === 1 && this.written(this.found[0])) this.found = [];
    this.pick = 0;
    this.list.hidden = !this.found.length;
    this.list.replaceChildren(...this.found.map((one, i) => this.option(one, i)));
    this.mark();
  }

  close() {
    this.found = [];
    this.list.hidden = true;
    this.mark();
  }

  written(one) {
    return one.label === this.at.prefix || one.insert === this.area.value.slice(this.at.from, this.area.selectionStart);
  }

  option(one, i) {
    const item = el("li", { role: "option", id: `offer-${i}`, "aria-selected": i === this.pick }, one.label);
    item.addEventListener("pointerdown", (event) => {
      event.preventDefault(); // the editor keeps the focus
      this.pick = i;
      this.take();
    });
    return item;
  }

  mark() {
    [...this.list.children].forEach((one, i) => one.setAttribute("aria-selected", i === this.pick));
    const one = this.found[this.pick];
    if (one) this.area.setAttribute("aria-activedescendant", `offer-${this.pick}`);
    else this.area.removeAttribute("aria-activedescendant");
    this.list.children[this.pick]?.scrollIntoView({ block: "nearest" });
    this.about.textContent = one ? `${one.label}: ${one.about || "a name"}` : "";
  }

  move(by) {
    this.pick = (this.pick + by + this.found.length) % this.found.length;
    this.mark();
  }

  take() {
    const { insert } = this.found[this.pick];
    this.area.setRangeText(insert, this.at.from, this.area.selectionStart, "end");
    this.close();
    this.changed();
    if (insert.endsWith(" = ")) this.open();
  }

  // Tab indents, and takes an offer where there are some; behind Escape it leaves the editor.
  pressed(event) {
    const leaves = this.escaped;
    this.escaped = event.key === "Escape" && !this.found.length;
    const act = this.found.length
      ? {
          ArrowDown: () => this.move(1),
          ArrowUp: () => this.move(-1),
          Enter: () => this.take(),
          Tab: () => this.take(),
          Escape: () => this.close(),
        }[event.key]
      : { Tab: leaves || event.shiftKey ? null : () => this.indent() }[event.key];
    if (event.key === " " && event.ctrlKey) this.open();
    else if (act) act();
    else return;
    event.preventDefault();
  }

  indent() {
    this.area.setRangeText("  ", this.area.selectionStart, this.area.selectionEnd, "end");
    this.changed();
  }
}
