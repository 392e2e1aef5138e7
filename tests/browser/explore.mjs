// Clicks through the page of `deltafold explore` in Chromium: every function, at three widths, light and dark.
//
//   node explore.mjs ADDRESS HISTORY DAMAGED MANY SCREENSHOTS
//
// The addresses are those of fixtures/kubernetes, of fixtures/history, of fixtures/kubernetes with a damaged delta, and of
// 10,000 Pods.
// Anything on the console, anything that axe finds against WCAG 2 A or AA or calls serious, and any surprise ends it with 1. Its last line is a JSON list of
// the commands that the page has shown; the caller runs them. tests/end_to_end/explore_page.rs calls it.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";

const modules = process.env.DELTAFOLD_TEST_BROWSER_MODULES;
const require = createRequire(`${modules}/`);
const { chromium } = require("playwright-core");
const axe = await readFile(require.resolve("axe-core/axe.min.js"), "utf8");
const [address, history, damaged, many, screenshots] = process.argv.slice(2);

// Without these, Chromium asks its maker's servers.
const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args });
const commands = new Set();
const problems = [];

/** Opens the page at a width, and notes everything on its console. */
async function open(width, colorScheme, at = address, height = 900) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme, acceptDownloads: true, timezoneId: "UTC" });
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  const page = await context.newPage();
  page.setDefaultTimeout(10_000);
  page.on("console", (message) => problems.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(at).origin) problems.push(`a request to ${request.url()}`);
  });
  await page.goto(at);
  await page.waitForSelector("#list .command");
  return page;
}

/** Notes what axe finds, and the commands of the view. */
async function inspect(page, name) {
  const found = await page.evaluate(`(() => { const module = undefined; ${axe}; return axe.run(document); })()`);
  assert.ok(found.passes.length > 15, `${name}: axe has checked too little`);
  for (const violation of found.violations) {
    if (["serious", "critical"].includes(violation.impact) || violation.tags.some((tag) => ["wcag2a", "wcag2aa"].includes(tag))) {
      problems.push(`${name}: ${violation.id}: ${violation.nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`);
    }
  }
  for (const text of await page.locator(".command code").allTextContents()) commands.add(text);
}

/** Takes a picture, for whoever has changed the page. README.md shows changes-1280-light. */
const screenshot = (page, name) => page.screenshot({ path: `${screenshots}/${name}.png` });

/** The text of an element. */
const text = (page, selector) => page.locator(selector).innerText();

async function wait(page, selector, part) {
  const isThere = ([s, p]) => document.querySelector(s)?.innerText.includes(p);
  await page.waitForFunction(isThere, [selector, part]).catch(async (error) => {
    const there = await page.locator(selector).allInnerTexts();
    throw new Error(`${selector} does not show "${part}" at ${page.url()}, but ${JSON.stringify(there).slice(0, 2000)}`, { cause: error });
  });
}

/** Chooses something by the address. */
const hash = (page, text) => page.evaluate((hash) => (location.hash = hash), text);

/** Writes a moment into "Go to". */
async function goTo(page, moment) {
  await page.locator("#where").fill(moment);
  await page.keyboard.press("Enter");
}

/** Drags over the plot between two shares of it. */
async function drag(page, from, to) {
  const box = await page.locator("#plot").boundingBox();
  const at = (share) => page.mouse.move(box.x + box.width * share, box.y + 60);
  await at(from);
  await page.mouse.down();
  await at(to);
  await page.mouse.up();
}

const clipboard = (page) => page.evaluate(() => navigator.clipboard.readText());

// Three clicks: from the opened page to the deleted object, ready for kubectl apply. No date is typed.
const three = await open(1280, "light");
await wait(three, "#list", "441 changes");
await drag(three, 0.55, 0.62);
await three.locator("#list tr.deleted", { hasText: "configmap/cm-3" }).click();
await three.locator("#detail button").nth(1).click();
await wait(three, "#detail", "Copied");
const copied = await clipboard(three);
assert.match(copied, /^apiVersion: v1\ndata:\n {2}a: "3"\nkind: ConfigMap\nmetadata:\n {2}name: cm-3\n {2}namespace: shop\n$/);
await wait(three, "#gone", "as it was last, at revision 597");
await wait(three, "#detail .command", "deltafold recover configmap/shop/cm-3 --revision 597");
await inspect(three, "three clicks");
await screenshot(three, "changes-1280-light");
// The range is in the address, stays when the object is closed, and limits what was deleted.
assert.match(three.url(), /from=.*to=/);
await three.locator("#close").click();
await three.waitForFunction(() => document.body.dataset.open === "false");
assert.match(three.url(), /from=.*to=/);
assert.ok((await three.locator("#list tr.line").count()) < 100);
await three.locator("#views a", { hasText: "Deleted" }).click();
await wait(three, "#list", "cm-3");
await wait(three, "#list", "ReplicaSet/web-");
assert.deepEqual(await three.locator("#list table").first().locator("th").allInnerTexts(), ["Kind", "Name", "Owner", "Deleted"]);
await inspect(three, "deleted");
await drag(three, 0.9, 0.99);
await wait(three, "#list", "Nothing was deleted");
await three.locator("#whole").click();
await wait(three, "#list", "cm-3");
await three.context().close();

// Changes: filters, what happened, j and k, just before and just after.
const page = await open(1280, "light");
assert.ok(!page.url().includes("token"), "the token stays in the address");
assert.deepEqual(await page.context().cookies(), [], "cookies go to other ports, too");
const shown = await page.evaluate(async () => {
  const { command, naming, valued } = await import("/dom.js");
  const words = ["get", ...valued("--prefix", "--termination-log=F"), ...naming("-x;y", ["a'b", "\u001b'\u202e"])];
  return command(words).querySelector("code").textContent;
});
assert.equal(shown, "get --prefix=--termination-log=F 'a'\\''b' $'\\x1b\\'\\xe2\\x80\\xae' -- '-x;y'");
await wait(page, "#moment", "2026-11-21 02:32:16 · newest");
await wait(page, "#list", "newest first; Events and Leases are hidden: choose the kind to see them");
await page.locator("[name=only]").selectOption("deleted");
await wait(page, "#list", "9 changes");
await inspect(page, "deletions");
await page.locator("[name=only]").selectOption("");
await page.locator("[name=ckind]").selectOption({ label: "Deployment" });
await wait(page, "#list", "changed by kubectl");
await wait(page, "#list .what", "");
await page.locator("[name=cword]").fill("web-2");
await page.keyboard.press("Tab");
await wait(page, "#list", "31 changes");
await inspect(page, "filtered");
await page.locator("#list tr.line", { hasText: "spec.replicas: 3 -> 1" }).first().click();
await wait(page, ".diff", "replicas: 1");
await wait(page, ".diff", "replicas: 3");
const heads = await page.locator(".diff th").allInnerTexts();
assert.match(heads[0], /revision \d+$/);
const first = await page.locator("#list tr[aria-current]").innerText();
await page.keyboard.press("j");
await page.waitForFunction((old) => document.querySelector("#list tr[aria-current]").innerText !== old, first);
await page.keyboard.press("k");
await page.waitForFunction((old) => document.querySelector("#list tr[aria-current]").innerText === old, first);
await page.locator(".diff .more button").first().click();
await page.locator("[name=with]").selectOption("now");
await page.waitForFunction((old) => document.querySelectorAll(".diff th")[1].innerText !== old, heads[1]);
await inspect(page, "compare with now");
await page.keyboard.press("Escape");
await page.waitForFunction(() => document.body.dataset.open === "false");
await page.locator("[name=cword]").fill("");
await page.keyboard.press("Tab");
await page.locator("[name=ckind]").selectOption("");
await wait(page, "#list", "441 changes");

// Objects: the tree, a kind with the columns of get, sorted and filtered, an object.
await page.locator("#views a", { hasText: "Objects" }).click();
await page.locator("#tree summary", { hasText: "shop" }).click();
await page.locator("#tree details", { hasText: "shop" }).locator("button", { hasText: /^Pod/ }).click();
await wait(page, "#list", "READY");
assert.deepEqual((await page.locator("#list th").allInnerTexts()).map((head) => head.replace(" ▲", "")), ["Pod", "READY", "STATUS", "NODE", "Changed"]);
const names = () => page.locator("#list tbody tr td:first-child").allInnerTexts();
const byName = await names();
await page.getByRole("button", { name: "Changed" }).click();
await page.waitForFunction(() => document.querySelector('th[aria-sort="ascending"]')?.innerText.startsWith("Changed"));
await wait(page, "#list", "8 objects");
assert.notDeepEqual(await names(), byName);
assert.deepEqual((await names()).sort(), byName);
await page.locator("[name=word]").fill("once");
await page.keyboard.press("Tab");
await wait(page, "#list", "1 object");
await inspect(page, "pods");
await page.locator("#newest").click();
await wait(page, "#moment", "newest");
await page.locator("#tree details", { hasText: "shop" }).locator("button", { hasText: /^Deployment/ }).click();
await page.locator("#list tr.line", { hasText: "web-2" }).click();
await wait(page, "#detail", "deployment/shop/web-2");
assert.match(await text(page, "#detail pre"), /^apiVersion: apps\/v1\nkind: Deployment\n/);
assert.ok(!(await text(page, "#detail pre")).includes("managedFields"));
await inspect(page, "yaml");
await screenshot(page, "yaml-1280-light");

// Options, download, copy.
await page.getByLabel("Managers").check();
await wait(page, "#detail pre", "managedFields");
await page.getByLabel("Managers").uncheck();
await page.getByLabel("Only what a user sets").check();
await page.waitForFunction(() => !document.querySelector("#detail pre").innerText.includes("status:"));
await page.getByLabel("Only what a user sets").uncheck();
await wait(page, "#detail pre", "status:");
const [download] = await Promise.all([page.waitForEvent("download"), page.getByText("Download YAML").click()]);
assert.equal(download.suggestedFilename(), "deployment-shop-web-2-628.yaml");
assert.match(await readFile(await download.path(), "utf8"), /kind: Deployment/);
await page.locator("#detail .command button").last().click();
await wait(page, "#detail > .command", "Copied");
assert.match(await clipboard(page), /^deltafold get deployment\/shop\/web-2 --revision 628/);

// The life of the object, and one of its versions.
await page.keyboard.press("l");
await wait(page, "#detail", "31 versions");
await wait(page, "#detail", "kube-controller-manager");
await wait(page, "#detail", "Events about it");
await inspect(page, "life");
await screenshot(page, "life-1280-light");
await page.locator('.life button[data-revision="451"]').click();
await wait(page, "#revision", "revision 451");
await wait(page, "#detail pre", 'resourceVersion: "451"');
await page.keyboard.press("c");
await page.locator("[name=with]").selectOption("303");
await wait(page, ".diff thead", "revision 303");
assert.ok((await page.locator(".diff tr.changed, .diff tr.added").count()) > 0);
await inspect(page, "compare");

// Without another moment, it opens on the last change of the spec, and not on those of the status after it.
await page.evaluate(() => (location.hash = location.hash.replace("&with=303", "").replace("&at=451", "")));
await wait(page, "#detail", "The last change of more than the status");
await wait(page, "#detail .fields", "spec.replicas: 3 → 1");
await page.keyboard.press("l");
await wait(page, "#detail", "etcd does not store which person");
await page.getByLabel("Only what a user sets").check();
await wait(page, "#detail", "changed nothing that a user sets, and are hidden");
assert.ok((await page.locator(".life > li").count()) < 31);
await page.getByLabel("Only what a user sets").uncheck();
await wait(page, ".life", "status.");

// A link has the moment and the object. The token is only in this tab: without it, there is one sentence.
await page.evaluate(() => (location.hash += "&at=451&with=303"));
await page.keyboard.press("c");
await wait(page, ".diff thead", "revision 303");
await page.locator("#link").click();
await wait(page, "#link", "Copied");
const link = await clipboard(page);
assert.match(link, /at=451/);
assert.ok(!link.includes("token"));
const copy = await page.context().newPage();
await copy.goto(`${link}&${new URL(address).hash.slice(1)}`);
await wait(copy, "#revision", "revision 451");
await wait(copy, ".diff thead", "revision 303");
assert.ok(!copy.url().includes("token"), "the token stays in the address");
await copy.evaluate(() => sessionStorage.clear());
await copy.reload();
await wait(copy, "#problem", "Only the whole address that deltafold explore printed opens this page");
assert.equal((await text(copy, "body")).split("\n").filter((line) => line.trim()).length, 2);
await copy.close();

// The slider, by keys and by its buttons.
await page.keyboard.press("Escape");
await page.keyboard.press("t");
const before = await text(page, "#moment");
for (let n = 0; n < 40; n += 1) await page.keyboard.press("ArrowLeft");
await page.waitForFunction((old) => document.querySelector("#moment").innerText !== old, before);
await goTo(page, "2026-11-21 02:31:10Z");
await wait(page, "#moment", "2026-11-21 02:31:0");
await goTo(page, "500");
await wait(page, "#revision", "revision 500");
await page.locator("#next").click();
await wait(page, "#revision", "revision 501");
await page.locator("#previous").click();
await wait(page, "#revision", "revision 500");
await goTo(page, "no such time");
await wait(page, "#go [role=alert]", "neither a revision nor a time");
await goTo(page, "yesterday");
await wait(page, "#go [role=alert]", "which hour?");
await goTo(page, "2020-01-01 00:00");
await wait(page, "#go [role=alert]", "The backup begins at");
await wait(page, "#revision", "revision 500");
await inspect(page, "refused");
await goTo(page, "501");
await wait(page, "#revision", "revision 501");
assert.equal(await page.locator("[role=alert]").count(), 0);
await wait(page, "#zone", "times in UTC+00:00 (UTC)");

// The plot: round times, what is under the pointer, colours that stay, and a range that is written.
const axis = () => text(page, "#axis");
const whole = await axis();
assert.match(whole, /02:31\n/);
const colours = () => page.locator("#legend li").evaluateAll((all) => Object.fromEntries(all.map((one) => [one.innerText.replace(/ [\d,]+$/, ""), one.className])));
const ofWhole = await colours();
assert.match(await page.locator("#plot").getAttribute("aria-label"), /9 deletions among them/);
assert.ok((await page.locator("#plot rect.deletions").count()) > 0);
assert.equal(await page.locator("#plot rect.delta").count(), 0);
const box = await page.locator("#plot").boundingBox();
await page.mouse.move(box.x + box.width * 0.6, box.y + 60);
await wait(page, "#plot .label", "2026-11-21 02:3");
await drag(page, 0.4, 0.6);
await page.waitForFunction((old) => document.querySelector("#axis").innerText !== old, whole);
for (const [kind, colour] of Object.entries(await colours())) assert.equal(colour, ofWhole[kind], kind);
await inspect(page, "range");
await screenshot(page, "range-1280-light");
await page.locator("#whole").click();
await page.waitForFunction((old) => document.querySelector("#axis").innerText === old, whole);
assert.ok(await page.locator("#whole").isHidden());
await page.locator("#from").fill("2026-11-21 02:31:30");
await page.locator("#to").fill("2026-11-21 02:31:40");
await page.keyboard.press("Enter");
await page.waitForFunction((old) => document.querySelector("#axis").innerText !== old, whole);
await wait(page, "#list", "cm-3");
await page.locator("#from").fill("never");
await page.keyboard.press("Enter");
await wait(page, "#range [role=alert]", "neither a revision nor a time");
await page.keyboard.press("Tab");
await page.locator("#whole").click();
await page.waitForFunction((old) => document.querySelector("#axis").innerText === old, whole);
await page.locator("#plot").click({ position: { x: box.width / 2, y: 50 } });
await page.waitForFunction(() => !document.querySelector("#moment").innerText.includes("newest"));
await page.locator("#newest").click();
await wait(page, "#moment", "newest");
await page.keyboard.press("+");
await page.waitForFunction((old) => document.querySelector("#axis").innerText !== old, whole);
await page.keyboard.press("Escape");
await page.waitForFunction((old) => document.querySelector("#axis").innerText === old, whole);

// An object that is gone is found, by keyboard alone, and is shown as it was last.
await page.keyboard.press("/");
await page.keyboard.type("shop web-3");
await wait(page, "#found", "Deployment");
assert.deepEqual(await page.locator("#found th").allInnerTexts(), ["Kind", "Namespace", "Name", "Changed"]);
await wait(page, "#found", "deleted at 2026-11-21 02:3");
const selected = () => page.evaluate(() => {
  const row = document.getElementById(document.querySelector("#query").getAttribute("aria-activedescendant"));
  return [row.getAttribute("aria-selected"), row.rowIndex, row.cells[0].innerText, row.cells[2].title];
});
assert.deepEqual((await selected()).slice(0, 2), ["true", 1]);
for (const key of ["ArrowDown", "ArrowDown", "ArrowUp"]) await page.keyboard.press(key);
assert.deepEqual((await selected()).slice(0, 2), ["true", 2]);
// Nothing breaks inside a word: each row has one line.
const heights = await page.locator("#found tbody tr").evaluateAll((rows) => rows.map((row) => row.clientHeight));
assert.ok(Math.max(...heights) < 40, `${heights}`);
await inspect(page, "search of names");
await screenshot(page, "found-1280-light");
for (const words of ["deployment/shop/web-3", "deploy web-3"]) {
  await page.locator("#query").fill(words);
  await page.keyboard.press("Enter");
  await wait(page, "#detail", "deployment/shop/web-3");
  assert.equal((await selected())[3], "web-3", words);
}
await wait(page, "#gone", "as it was last");
assert.match(await text(page, "#detail pre"), /name: web-3/);
await inspect(page, "gone");
await page.keyboard.press("Tab");
await page.locator("#query").fill("no such name");
await wait(page, "#list", "at any time");

// Search by labels and content.
await page.locator("#query").fill("web-1");
await wait(page, "#found", "web-1");
await page.locator("#within").selectOption("labels");
await page.locator("#query").fill("app=web-1");
await wait(page, "#list", "ReplicaSet");
await page.locator("#within").selectOption("content");
await page.locator("#query").fill("progressDeadlineSeconds: 600");
await wait(page, "#list", "2 objects");
await inspect(page, "search");
await page.locator("#query").fill("=x");
await page.locator("#within").selectOption("labels");
await wait(page, "#problem", "label");

// Secrets are hidden until asked for; with its values, one is ready for kubectl apply.
await page.locator("#within").selectOption("names");
await page.locator("#query").fill("secret db");
await wait(page, "#found", "db");
await page.keyboard.press("Enter");
await wait(page, "#detail", "secret/shop/db");
await wait(page, "#detail pre", "<hidden, 7 bytes>");
await page.getByRole("button", { name: "Copy for kubectl apply, with its values" }).click();
await wait(page, "#detail", "Copied");
assert.match(await clipboard(page), /ZXhhbXBsZQ==/);
await page.getByLabel("Show the values of Secrets").check();
await wait(page, "#detail pre", "ZXhhbXBsZQ==");
await page.getByLabel("Show the values of Secrets").uncheck();
await wait(page, "#detail pre", "<hidden, 7 bytes>");

// The backup, and the keys.
await page.locator("#views a", { hasText: "Backup" }).click();
await wait(page, "#list", "6 snapshots");
await wait(page, "#list", "Verified");
assert.equal(await page.locator(".chains rect").count(), 6);
await inspect(page, "backup");
await screenshot(page, "backup-1280-light");
await page.locator("#list td button", { hasText: "full" }).click();
await wait(page, "#revision", "revision 275");
await page.keyboard.press("?");
await page.getByRole("heading", { name: "Keys" }).waitFor();
await inspect(page, "keys");
await page.keyboard.press("Escape");

// A slow server: the page says that it waits, and an answer to another question is never shown.
await page.locator("#views a", { hasText: "Changes" }).click();
await wait(page, "#list", "441 changes");
await page.route("**/api/**", async (route) => {
  await new Promise((resolve) => setTimeout(resolve, 3000));
  await route.continue().catch(() => {});
});
await page.locator("#query").fill("cm-1");
await wait(page, "#list", "Searching for “cm-1”");
await page.waitForFunction(() => !document.getElementById("busy").hidden);
await page.locator("#query").fill("cm-2");
await wait(page, "#list", "Searching for “cm-2”");
await wait(page, "#found", "cm-2");
assert.ok(!(await text(page, "#found")).includes("cm-1"));
await page.waitForFunction(() => document.getElementById("busy").hidden);
await page.unroute("**/api/**");
await page.locator("#query").fill("");

// After an error of the network, a program that listens at the port gets no token.
let asked = 0;
await page.route("**/api/**", (route) => {
  asked += 1;
  return route.abort("connectionrefused");
});
await goTo(page, "400");
await wait(page, "#problem", "deltafold does not answer");
const askedBefore = asked;
await page.locator("#next").click();
await page.locator("#views a", { hasText: "Objects" }).click();
await page.waitForTimeout(1000);
assert.equal(asked, askedBefore);
assert.equal(await page.evaluate(() => sessionStorage.getItem("token")), null);
for (let nth = problems.length - 1; nth >= 0; nth -= 1) if (/net::ERR_CONNECTION_REFUSED|400 \(Bad Request\)|401 \(Unauthorized\)/.test(problems[nth])) problems.splice(nth, 1);
await page.context().close();

// A history with a namespace that is gone, and a ConfigMap with two managers.
const past = await open(1280, "light", history);
await past.locator("#views a", { hasText: "Deleted" }).click();
await wait(past, "#list", "old · the namespace was deleted");
await past.locator("#list summary", { hasText: "old" }).click();
await past.locator("#list tr", { hasText: "Secret" }).locator("button", { hasText: "db" }).click();
await wait(past, "#detail pre", "<hidden, 7 bytes>");
await past.locator("#query").fill("configmap/shop/settings");
await past.locator("#found button", { hasText: "settings" }).first().click();
await wait(past, "#detail", "configmap/shop/settings");
await past.keyboard.press("l");
await wait(past, "#detail", "changed by alice, bob");
await wait(past, "#detail", "created by alice");
await wait(past, "#detail", "data.owner");
await past.context().close();

// A damaged delta: what is before it is shown, and the break is marked.
const broken = await open(1280, "light", damaged);
await wait(broken, "#revision", "revision 616");
await wait(broken, "#legend", "a damaged snapshot");
await wait(broken, "#damage", "Incr-00000617-00000628");
assert.equal(await broken.locator("#plot rect.damaged").count(), 1);
const brokenBox = await broken.locator("#plot").boundingBox();
await broken.mouse.move(brokenBox.x + brokenBox.width - 2, brokenBox.y + 60);
await wait(broken, "#plot .label", "damaged: ");
await inspect(broken, "damaged");
await broken.context().close();

/** Fails if the page is wider than the window, or texts of the axis overlap. */
async function assertFits(page, name) {
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  assert.ok(overflow <= 0, `${name}: the page is ${overflow} pixels too wide`);
  const overlap = await page.evaluate(() => {
    const boxes = [...document.querySelectorAll("#axis li")].map((tick) => tick.getBoundingClientRect());
    return boxes.some((box, nth) => nth > 0 && box.left < boxes[nth - 1].right);
  });
  assert.ok(!overlap, `${name}: times of the axis overlap`);
}

// 10,000 objects in one list: the detail stands beside the click, also far down, and in the window.
for (const [width, scheme] of [[1280, "light"], [1920, "dark"], [390, "light"]]) {
  const long = await open(width, scheme, many, 800);
  await long.locator("#views a", { hasText: "Objects" }).click();
  await long.locator("#tree details", { hasText: "shop" }).locator("summary").click();
  await long.locator("#tree details", { hasText: "shop" }).locator("button", { hasText: /^Pod/ }).click();
  await wait(long, "#list", "1 to 1,000 of 10,000");
  await long.locator("#list tr.line").nth(990).click();
  await wait(long, "#detail pre", "kind: Pod");
  const seen = await long.evaluate(() => {
    const [row, top] = ["#list tr[aria-current]", "#detail .top"].map((part) => document.querySelector(part).getBoundingClientRect());
    return { row: row.top, top: top.top, height: innerHeight };
  });
  assert.ok(0 <= seen.top && seen.top < seen.height - 100, `${width}: the detail is not in the window: ${JSON.stringify(seen)}`);
  if (width > 900) assert.ok(0 <= seen.row && seen.row < seen.height, `${width}: ${JSON.stringify(seen)}`);
  const name = await text(long, "#detail .top strong");
  await long.keyboard.press("j");
  await long.waitForFunction((old) => document.querySelector("#detail .top strong").innerText !== old, name);
  await long.getByRole("button", { name: "NODE" }).click();
  await wait(long, "#list tbody tr:first-child", "node-0");
  await long.getByRole("button", { name: /NODE/ }).click();
  await wait(long, "#list tbody tr:first-child", "node-9");
  await assertFits(long, `10,000 objects ${width}`);
  if (width === 1920) await inspect(long, "10,000 objects");
  await screenshot(long, `many-${width}-${scheme}`);
  await long.context().close();
}

// Other widths, and the other colours.
for (const [width, scheme] of [[390, "light"], [390, "dark"], [1280, "dark"], [1920, "light"], [1920, "dark"]]) {
  const other = await open(width, scheme);
  const id = Buffer.from("/registry/deployments/shop/web-2").toString("base64url");
  const gone = Buffer.from("/registry/configmaps/shop/cm-3").toString("base64url");
  const views = {
    changes: ["", "#list", "configmap/cm-3"],
    compare: [`id=${id}&tab=compare&at=451&with=303`, ".diff thead", "revision 303"],
    yaml: [`view=objects&namespace=shop&id=${id}`, "#detail", "kind: Deployment"],
    gone: [`id=${gone}&at=598`, "#gone", "as it was last"],
    life: [`id=${id}&tab=life`, ".life", "created"],
    search: ["q=web-1", "#list", "web-1"],
    deleted: ["view=deleted", "#list", "web-3"],
    backup: ["view=backup", "#list", "6 snapshots"],
  };
  for (const [name, [address, part, says]] of Object.entries(views)) {
    await hash(other, address);
    await wait(other, part, says);
    await assertFits(other, `${name} ${width}`);
    await inspect(other, `${name} ${width} ${scheme}`);
    await screenshot(other, `${name}-${width}-${scheme}`);
  }
  await other.context().close();
}

await browser.close();
assert.deepEqual(problems, []);
console.log(JSON.stringify([...commands]));
