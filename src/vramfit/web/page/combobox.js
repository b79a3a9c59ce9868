// A text field that filters a list while one types. Keyboard: arrows, Enter, Escape; any other text may stay in it.

import { element } from "/drawing.js";

// `options`: what there is, each with `value`, `note` and `words` to be found by; `none(text)`: what to say where nothing
// is found; `onCommit(text)`: called for an option that was chosen, or a text that was left in the field.
export function combobox(input, list, { options, none, onCommit }) {
  let active = -1, shown = [], committed = "";

  function open(filter) {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    shown = options.filter((o) => words.every((word) => o.words.includes(word)));
    list.replaceChildren(...shown.map(row));
    if (!shown.length) list.append(element("li", { class: "none", role: "presentation", text: none(filter) }));
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    mark(filter ? Math.min(0, shown.length - 1) : shown.findIndex((o) => o.value === committed));
  }

  function row(option, index) {
    const made = element("li", { role: "option", id: `${list.id}-${index}`, "aria-selected": "false" },
      element("span", { text: option.value }), element("small", { text: option.note }));
    made.addEventListener("mousedown", (event) => event.preventDefault()); // the field keeps the focus
    made.addEventListener("click", () => commit(option.value));
    return made;
  }

  function close() {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }

  function mark(index) {
    active = index;
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === index)));
    if (index < 0) input.removeAttribute("aria-activedescendant");
    else {
      input.setAttribute("aria-activedescendant", `${list.id}-${index}`);
      list.children[index].scrollIntoView({ block: "nearest" });
    }
  }

  function commit(text) {
    close();
    input.value = text.trim() || committed;
    if (input.value !== committed) onCommit((committed = input.value));
  }

  input.addEventListener("input", () => {
    if (document.activeElement === input) open(input.value);
    if (options.some((o) => o.value === input.value)) onCommit((committed = input.value));
  });
  input.addEventListener("click", () => { if (list.hidden) { input.select(); open(""); } });
  input.addEventListener("blur", () => commit(input.value));
  input.addEventListener("keydown", (event) => {
    const isOpen = !list.hidden, step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && isOpen && shown.length) mark((Math.max(active, step < 0 ? 0 : -1) + step + shown.length) % shown.length);
    else if (step) open("");
    else if (event.key === "Enter") commit(isOpen && active >= 0 ? shown[active].value : input.value);
    else if (event.key === "Escape") { input.value = committed; close(); } else return;
    event.preventDefault();
  });
  return { get value() { return committed; }, set(text) { input.value = committed = text; close(); } };
}
