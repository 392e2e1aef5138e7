// What is chosen, and the backup. The address has what is chosen, after #.

export const page = {
  /** The backup, as /api/backup has it. */
  backup: null,
  /** What is chosen: the range, the moment, the view, and what it shows. */
  chosen: {},
};

/** Reads what is chosen from the address. */
export function readAddress() {
  page.chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Changes what is chosen. The address follows, so that a link keeps the moment and the object. */
export function choose(changes) {
  const next = { ...page.chosen, ...changes };
  for (const key of Object.keys(next)) if (next[key] === null || next[key] === undefined || next[key] === "") delete next[key];
  // The address tells of the change later: another one may come before.
  page.chosen = next;
  location.hash = new URLSearchParams(next).toString();
}

export const view = () => (page.chosen.q ? "search" : (page.chosen.view ?? "changes"));
export const sourceFlags = () => [page.backup.flag, page.backup.name];
export const kinds = () => page.backup.window.kinds;

/** The range, for the API: nothing for the whole window. */
export const range = () => ({ from: page.chosen.from, to: page.chosen.to });
/** The range, for a command. */
export const rangeFlags = () => [...(page.chosen.from ? ["--since", page.chosen.from] : []), ...(page.chosen.to ? ["--until", page.chosen.to] : [])];

/** Names a kind, with its group if another one has the same name. */
export function kindLabel(id) {
  const kind = kinds()[id];
  if (!kind) return "key";
  const isAlone = kinds().filter((other) => other.kind === kind.kind).length === 1;
  return isAlone || !kind.group ? kind.kind : `${kind.kind} (${kind.group})`;
}

/** Names a listed object as a command does, without its namespace. */
export function shortName(object) {
  const kind = kinds()[object.kind];
  return kind ? `${kind.reference}/${object.name}` : object.name;
}

/** A control that changes what is chosen. */
export function bound(control, name, isChecked = false) {
  control.name = name;
  if (isChecked) control.checked = Boolean(page.chosen[name]);
  else control.value = page.chosen[name] ?? "";
  control.addEventListener("change", () => choose({ [name]: isChecked ? (control.checked ? "true" : null) : control.value, offset: null }));
  return control;
}
