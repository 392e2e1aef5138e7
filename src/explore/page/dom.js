// Elements, requests and texts. Names and values of the backup only ever become text nodes and attributes.

/** Makes an element: attributes, listeners (on…), and children, which may be texts. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Makes an SVG element. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** An error of the API, with its reason. */
export class ApiError extends Error {
  constructor(status, body) {
    super(body.message ?? body);
    this.status = status;
    this.reason = body.reason ?? "";
  }
}

/**
 * Moves the token of the address that was printed into this tab, so that it does not stay in the address. No other port and
 * no other site can read it there.
 */
export function takeToken() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const token = parameters.get("token");
  if (!token) return;
  sessionStorage.setItem("token", token);
  parameters.delete("token");
  history.replaceState(null, "", `#${parameters}`);
}

/** The answers of the API, by their requests: what is read of a backup does not change. */
const answers = new Map();
const MOST_ANSWERS = 100;

/** Asks the API. Parameters without a value are left out. */
export async function ask(path, parameters = {}, signal = undefined) {
  return (await request(path, parameters, signal)).json();
}

/** Asks the API, or returns what it has answered before. */
export async function once(path, parameters, signal) {
  const key = JSON.stringify([path, parameters]);
  if (!answers.has(key)) {
    const answer = await ask(path, parameters, signal);
    answers.set(key, answer);
    if (answers.size > MOST_ANSWERS) answers.delete(answers.keys().next().value);
  }
  return answers.get(key);
}

/** Saves an answer as a file. A link could not send the token. */
export async function download(path, parameters) {
  const answer = await request(path, parameters);
  const name = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition") ?? "");
  const href = URL.createObjectURL(await answer.blob());
  h("a", { href, download: name?.[1] ?? "download" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

/** Returns an answer as text. */
export const textOf = async (path, parameters) => (await request(path, parameters)).text();

/** Whoever listens at the port now may be another program: it does not get the token. */
let isGone = false;
/** The number of requests without an answer. */
let waiting = 0;

/** Shows after a moment that an answer is awaited. */
function wait(step) {
  waiting += step;
  setTimeout(() => {
    byId("busy").hidden = waiting === 0;
    document.body.ariaBusy = waiting > 0 ? "true" : null;
  }, waiting > 0 ? 200 : 0);
}

async function request(path, parameters, signal) {
  if (isGone) throw new TypeError("the page has stopped asking");
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    // An empty namespace is a value.
    const isNone = value === null || value === undefined || value === false || (value === "" && key !== "namespace");
    if (!isNone) query.set(key, value);
  }
  const text = query.toString();
  const headers = { authorization: `Bearer ${sessionStorage.getItem("token")}` };
  wait(1);
  try {
    const answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal, headers });
    if (answer.ok) return answer;
    const body = await answer.text();
    let error = body;
    try {
      error = JSON.parse(body).error;
    } catch {
      // The guard answers with plain text.
    }
    throw new ApiError(answer.status, error);
  } catch (error) {
    if (error instanceof TypeError) {
      isGone = true;
      sessionStorage.removeItem("token");
    }
    throw error;
  } finally {
    wait(-1);
  }
}

/** Text and a number at its right. */
export const counted = (text, n) => [h("span", { translate: "no" }, text), h("span", { class: "count" }, n.toLocaleString("en"))];

/** A table with these rows. */
export function table(heads, rows, attributes = {}) {
  const head = h("tr", {}, heads.map((text) => (text instanceof Node ? text : h("th", { scope: "col" }, text))));
  return h("table", attributes, h("thead", {}, head), h("tbody", {}, rows));
}

/** A part that scrolls by itself. */
export const scrolled = (label, child) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, child);

/** Calls `act` when a form is sent. */
export function onSubmit(form, act) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
  return form;
}

/** Says beside a field why its value is refused; takes that back without a text. */
export function refuse(field, text) {
  const form = field.form;
  form.querySelector(".refused")?.remove();
  field.removeAttribute("aria-invalid");
  if (!text) return;
  field.setAttribute("aria-invalid", "true");
  form.append(h("span", { class: "refused", role: "alert" }, text));
}

/** Calls `act` when nothing has called it again for some milliseconds. */
export function debounced(milliseconds, act) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), milliseconds);
  };
}

const units = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A size in bytes as text. */
export function size(bytes) {
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit]}`;
}

export const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

const two = (n) => String(Math.floor(n)).padStart(2, "0");

/** A time of the API, in the time zone of the browser and short. */
export function shortTime(text) {
  if (!text) return "time unknown";
  const time = new Date(text);
  const date = `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
  return `${date} ${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
}

/** The same in a table: beside an open object there is no room for the day. */
export function timeCell(text, before = "") {
  const time = shortTime(text);
  return h("td", { class: "when", title: before + time }, before, h("span", { class: "day" }, text ? time.slice(0, 11) : ""), text ? time.slice(11) : time);
}

/** The time zone of all times, and its distance from UTC at a time. */
export function timeZone(text) {
  const minutes = -new Date(text ?? Date.now()).getTimezoneOffset();
  const distance = `UTC${minutes < 0 ? "-" : "+"}${two(Math.abs(minutes) / 60)}:${two(Math.abs(minutes) % 60)}`;
  return `times in ${distance} (${Intl.DateTimeFormat().resolvedOptions().timeZone})`;
}

/** Controls a terminal, or changes the writing direction. */
const unsafe = /[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufdd0-\ufdef]/u;

/** A word for a shell, as base::shell writes it. */
function quoted(word) {
  if (/^[A-Za-z0-9_.,:/=@%+-]+$/.test(word)) return word;
  if (!unsafe.test(word)) return `'${word.replaceAll("'", "'\\''")}'`;
  const escaped = word.replaceAll(/['\\]/g, "\\$&").replaceAll(new RegExp(unsafe, "gu"), (c) => {
    const bytes = [...new TextEncoder().encode(c)];
    return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  });
  return `$'${escaped}'`;
}

/** A flag with a value, which may look like a flag. */
export const valued = (flag, value) => (value.startsWith("-") ? [`${flag}=${value}`] : [flag, value]);

/** A word and the flags of a command. The word may look like a flag. */
export const naming = (word, flags) => (word.startsWith("-") ? [...flags, "--", word] : [word, ...flags]);

/** A button that copies what `text` returns. */
export function copyButton(label, text) {
  const button = h("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(await text());
      button.textContent = "Copied";
    } catch (error) {
      button.textContent = error instanceof ApiError ? error.message : "The browser does not allow it: select the text";
    }
    setTimeout(() => (button.textContent = label), 2000);
  });
  return button;
}

/** A command with a button that copies it. */
export function command(words) {
  const text = words.map(quoted).join(" ");
  return h("p", { class: "command" }, h("code", { translate: "no" }, text), copyButton("Copy", () => text));
}

/** What is shown instead of something that cannot be shown. */
export function failure(error) {
  const sentence = {
    401: "Only the whole address that deltafold explore printed opens this page: ask whoever runs it for the part after #token=.",
    503: "The backup is still being read: this page tries again.",
  }[error.status];
  const gone = error instanceof TypeError;
  const text = gone ? "deltafold does not answer: it has ended, or the connection has. Start it again, and open the new address." : (sentence ?? error.message);
  return h("p", { class: "failure", role: "alert" }, text);
}
