// Clicks through the page of `deltafold explore` in Chromium: every function, at three widths, light and dark.
//
//   node explore.mjs ADDRESS HISTORY DAMAGED SCREENSHOTS
//
// The addresses are those of fixtures/kubernetes, of fixtures/history, and of fixtures/kubernetes with a damaged delta.
// Anything on the console, anything that axe finds against WCAG 2 A or AA or calls serious, and any surprise ends it with 1. Its last line is a JSON list of
// the commands that the page has shown; the caller runs them. tests/end_to_end/explore_page.rs calls it.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";

const modules = process.env.DELTAFOLD_TEST_BROWSER_MODULES;
const require = createRequire(`${modules}/`);
const { chromium } = require("playwright-core");
const axe = await readFile(require.resolve("axe-core/axe.min.js"), "utf8");
const [address, history, damaged, screenshots] = process.argv.slice(2);

// Without these, Chromium asks its maker's servers.
const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args });
const commands = new Set();
const problems = [];

/** Opens the page at a width, and notes everything on its console. */
async function open(width, colorScheme, at = address) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, acceptDownloads: true, timezoneId: "UTC" });
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  const page = await context.newPage();
  page.setDefaultTimeout(10_000);
  page.on("console", (message) => problems.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(at).origin) problems.push(`a request to ${request.url()}`);
  });
  await page.goto(at);
  await page.waitForSelector("#tree details");
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

/** Takes a picture of the top of the page, for whoever has changed it. README.md shows compare-1280-light. */
async function screenshot(page, name) {
  await page.evaluate(() => window.scrollTo(0, 0));
  await page.screenshot({ path: `${screenshots}/${name}.png` });
}

/** The text of an element. */
const text = (page, selector) => page.locator(selector).innerText();

async function wait(page, selector, part) {
  const isThere = ([s, p]) => document.querySelector(s)?.innerText.includes(p);
  await page.waitForFunction(isThere, [selector, part]).catch(async (error) => {
    const there = await page.locator(selector).allInnerTexts();
    throw new Error(`${selector} does not show "${part}" at ${page.url()}, but ${JSON.stringify(there)}`, { cause: error });
  });
}

/** Writes a moment into "Go to". */
async function goTo(page, moment) {
  await page.locator("#where").fill(moment);
  await page.keyboard.press("Enter");
}

const page = await open(1280, "light");

// The tree, a kind, an object.
assert.ok(!page.url().includes("token"), "the token stays in the address");
assert.deepEqual(await page.context().cookies(), [], "cookies go to other ports, too");
const shown = await page.evaluate(async () => {
  const { command, naming, valued } = await import("/dom.js");
  const words = ["get", ...valued("--prefix", "--termination-log=F"), ...naming("-x;y", ["a'b", "\u001b'\u202e"])];
  return command(words).querySelector("code").textContent;
});
assert.equal(shown, "get --prefix=--termination-log=F 'a'\\''b' $'\\x1b\\'\\xe2\\x80\\xae' -- '-x;y'");
await wait(page, "#moment", "revision 628");
await page.locator("#tree summary", { hasText: "shop" }).click();
await page.locator("#tree details", { hasText: "shop" }).locator("button", { hasText: /^Deployment/ }).click();
await wait(page, "#list", "web-2");
await page.locator("#list button", { hasText: "web-2" }).click();
await wait(page, "#detail", "deployment/shop/web-2");
assert.match(await text(page, "#detail pre"), /^apiVersion: apps\/v1\nkind: Deployment\n/);
assert.ok(!(await text(page, "#detail pre")).includes("managedFields"));
await inspect(page, "yaml");
await screenshot(page, `yaml-1280-light`);

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
await page.locator("#detail .command button").first().click();
await wait(page, "#detail .command", "Copied");
assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^deltafold get deployment\/shop\/web-2 --revision 628/);

// The life of the object, and one of its versions.
await page.keyboard.press("l");
await wait(page, "#detail", "31 versions");
await wait(page, "#detail", "spec.replicas");
await wait(page, "#detail", "kube-controller-manager");
await wait(page, "#detail", "Events about it");
await inspect(page, "life");
await screenshot(page, `life-1280-light`);
await page.locator(".life button", { hasText: "revision 451" }).click();
await wait(page, "#moment", "revision 451");
await wait(page, "#detail pre", 'resourceVersion: "451"');

// Side by side with another moment.
await page.keyboard.press("c");
await wait(page, "#detail", "Compare with");
await page.locator("#detail select").selectOption("303");
await wait(page, ".diff thead", "revision 303");
assert.ok((await page.locator(".diff tr.changed, .diff tr.added").count()) > 0);
await page.locator(".diff .more button").first().click();
await page.getByLabel("Another moment").fill("310");
await page.locator("#detail form button").click();
await wait(page, ".diff thead", "revision 310");
await page.locator("#detail select").selectOption("303");
await wait(page, ".diff thead", "revision 303");
await inspect(page, "compare");
await screenshot(page, `compare-1280-light`);

// It opens on the last change of the spec, and not on those of the status after it.
await page.evaluate(() => (location.hash = location.hash.replace("&from=303", "").replace("&at=451", "")));
await wait(page, "#detail", "The last change of more than the status");
await wait(page, "#detail .fields", "spec.replicas: 3 → 1");
await wait(page, "#detail", "etcd does not store which person");
await inspect(page, "last change");
await page.keyboard.press("l");
await wait(page, "#detail", "31 versions");
await page.getByLabel("Only what a user sets").check();
await wait(page, "#detail .facts", "changed nothing that a user sets, and are hidden");
const kept = await page.locator(".life > li").count();
assert.ok(0 < kept && kept < 31, `${kept} versions`);
assert.ok(!(await text(page, ".life")).includes("status."));
await wait(page, ".life", "spec.replicas: 3 → 1");
await page.getByLabel("Only what a user sets").uncheck();
await wait(page, ".life", "status.");
await page.evaluate(() => (location.hash += "&at=451&from=303"));
await page.keyboard.press("c");
await wait(page, ".diff thead", "revision 303");

// A link keeps the moment and the object. The token is only in this tab.
const link = `${page.url()}&${new URL(address).hash.slice(1)}`;
const copy = await page.context().newPage();
await copy.goto(link);
await wait(copy, "#moment", "revision 451");
await wait(copy, ".diff thead", "revision 303");
assert.ok(!copy.url().includes("token"), "the token stays in the address");
await copy.close();

// The slider, by keys and by its buttons.
await page.keyboard.press("t");
const before = await text(page, "#moment");
for (let n = 0; n < 40; n += 1) await page.keyboard.press("ArrowLeft");
await page.waitForFunction((old) => document.querySelector("#moment").innerText !== old, before);
await goTo(page, "2026-11-21 02:31:10Z");
await wait(page, "#moment", "2026-11-21 02:31:0");
await goTo(page, "500");
await wait(page, "#moment", "revision 500");
await page.locator("#next").click();
await wait(page, "#moment", "revision 501");
await page.locator("#previous").click();
await wait(page, "#moment", "revision 500");
await goTo(page, "no such time");
await wait(page, "#go [role=alert]", "neither a revision nor a time");
await goTo(page, "yesterday");
await wait(page, "#go [role=alert]", "which hour?");
await goTo(page, "2020-01-01 00:00");
await wait(page, "#go [role=alert]", "The backup begins at revision");
await wait(page, "#moment", "revision 500");
await inspect(page, "refused");
await goTo(page, "501");
await wait(page, "#moment", "revision 501");
assert.equal(await page.locator("[role=alert]").count(), 0);
await wait(page, "#zone", "times in UTC+00:00 (UTC)");

// The plot: its axis, what is under the pointer, and zoom.
const axis = () => text(page, "#axis");
const whole = await axis();
assert.equal(await page.locator("#axis li").count(), 5);
assert.match(whole, /^2026-11-21 02:\d\d:\d\d/);
const box = await page.locator("#plot").boundingBox();
const over = (share) => page.mouse.move(box.x + box.width * share, box.y + 60);
await over(0.6);
await wait(page, "#plot .label", "2026-11-21 02:3");
await over(0.4);
await page.mouse.down();
await over(0.6);
await page.mouse.up();
await page.waitForFunction((old) => document.querySelector("#axis").innerText !== old, whole);
await inspect(page, "zoom");
await screenshot(page, "zoom-1280-light");
await page.locator("#whole").click();
await page.waitForFunction((old) => document.querySelector("#axis").innerText === old, whole);
assert.ok(await page.locator("#whole").isHidden());
await page.keyboard.press("+");
await page.waitForFunction((old) => document.querySelector("#axis").innerText !== old, whole);
await page.keyboard.press("Escape");
await page.waitForFunction((old) => document.querySelector("#axis").innerText === old, whole);
await over(0.5);
await page.mouse.down();
await page.mouse.up();
await page.waitForFunction(() => !document.querySelector("#moment").innerText.includes("revision 501"));
await page.locator("#newest").click();
await wait(page, "#moment", "newest");

// An object that is gone at the moment is found, by keyboard alone, and shows its life.
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
await page.keyboard.press("ArrowDown");
await page.keyboard.press("ArrowDown");
await page.keyboard.press("ArrowUp");
assert.deepEqual((await selected()).slice(0, 2), ["true", 2]);
// Nothing breaks inside a word: each row has one line.
const heights = await page.locator("#found tbody tr").evaluateAll((rows) => rows.map((row) => row.clientHeight));
assert.ok(Math.max(...heights) < 40, `${heights}`);
const widths = await page.evaluate(() => [document.querySelector("#found").clientWidth, document.querySelector("main").clientWidth]);
assert.ok(widths[0] > widths[1] * 0.9, `${widths}`);
await inspect(page, "search of names");
await screenshot(page, `found-1280-light`);
await page.locator("#query").fill("deployment web-3");
await page.keyboard.press("Enter");
await wait(page, "#detail", "deployment/shop/web-3");
await wait(page, "#detail", "deleted");
await page.keyboard.press("y");
await wait(page, "#detail", "does not exist at this moment");
await inspect(page, "gone");
await page.getByRole("button", { name: "Show its life" }).click();
await wait(page, ".life", "created");
await page.locator(".life .changed button").first().click();
await wait(page, "#detail pre", "name: web-3");
await page.locator("#newest").click();
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
await screenshot(page, `search-1280-light`);

// Secrets are hidden until asked for.
await page.locator("#within").selectOption("names");
await page.locator("#query").fill("secret db");
await wait(page, "#found", "db");
await page.keyboard.press("Enter");
await wait(page, "#detail", "secret/shop/db");
await page.keyboard.press("y");
await wait(page, "#detail pre", "<hidden, 7 bytes>");
await page.getByLabel("Show the values of Secrets").check();
await wait(page, "#detail pre", "ZXhhbXBsZQ==");
await page.getByLabel("Show the values of Secrets").uncheck();
await wait(page, "#detail pre", "<hidden, 7 bytes>");

// What was deleted, and one of them as it was last.
await page.locator("#views a", { hasText: "Deleted" }).click();
await wait(page, "#list", "web-3");
assert.deepEqual(await page.locator("#list table").first().locator("th").allInnerTexts(), ["Kind", "Name", "Owner", "Deleted"]);
await wait(page, "#list", "ReplicaSet/web-");
await page.locator("#since").fill("2020-01-01 00:00");
await page.locator("#list form button").click();
await wait(page, "#list form [role=alert]", "The backup begins at revision");
await inspect(page, "deleted");
await screenshot(page, `deleted-1280-light`);
await page.locator("#since").fill("620");
await page.locator("#list form button").click();
await wait(page, "#list", "Nothing was deleted");
await page.locator("#since").fill("275");
await page.locator("#list form button").click();
await wait(page, "#list form", "revision 275");
await page.locator("#list tr", { hasText: "cm-3" }).locator("button").click();
await wait(page, "#detail", "configmap/shop/cm-3");
assert.match(await text(page, "#detail pre"), /kind: ConfigMap/);

// The backup, and the keys.
await page.locator("#views a", { hasText: "Backup" }).click();
await wait(page, "#list", "6 snapshots");
await wait(page, "#list", "Verified");
await page.getByLabel("Mark what gc would remove").selectOption("limit");
await wait(page, "#list", "0 of 6 objects would go");
assert.equal(await page.locator(".chains rect").count(), 6);
await inspect(page, "backup");
await screenshot(page, `backup-1280-light`);
await page.locator("#list td button", { hasText: "full" }).click();
await wait(page, "#moment", "revision 275");
await page.keyboard.press("?");
await page.getByRole("heading", { name: "Keys" }).waitFor();
await inspect(page, "keys");
await page.keyboard.press("Escape");
await page.context().close();

// A history with a namespace that is gone, and a ConfigMap with two managers.
const past = await open(1280, "light", history);
await past.locator("#views a", { hasText: "Deleted" }).click();
await wait(past, "#list", "old · the namespace was deleted");
await past.locator("#list summary", { hasText: "old" }).click();
await past.locator("#list tr", { hasText: "Secret" }).locator("button", { hasText: "db" }).click();
await wait(past, "#detail pre", "<hidden, 7 bytes>");
await past.locator("#query").fill("configmap shop settings");
await past.locator("#found button", { hasText: "settings" }).first().click();
await wait(past, "#detail", "configmap/shop/settings");
await past.keyboard.press("l");
await wait(past, "#detail", "changed by alice, bob");
await wait(past, "#detail", "created by alice");
await wait(past, "#detail", "data.owner");
await past.context().close();

// A damaged delta: what is before it is shown, and the break is marked.
const broken = await open(1280, "light", damaged);
await wait(broken, "#moment", "revision 616");
await wait(broken, "#legend", "a damaged snapshot");
await wait(broken, "#damage", "Incr-00000617-00000628");
assert.equal(await broken.locator("#plot rect.damaged").count(), 1);
const brokenBox = await broken.locator("#plot").boundingBox();
await broken.mouse.move(brokenBox.x + brokenBox.width - 2, brokenBox.y + 60);
await wait(broken, "#plot .label", "damaged: ");
await inspect(broken, "damaged");
await screenshot(broken, "damaged-1280-light");
await broken.context().close();

// Other widths, and the other colours.
for (const [width, scheme] of [[390, "light"], [390, "dark"], [1280, "dark"], [1920, "light"], [1920, "dark"]]) {
  const other = await open(width, scheme);
  const id = Buffer.from("/registry/deployments/shop/web-2").toString("base64url");
  await other.evaluate((hash) => (location.hash = hash), `namespace=shop&kind=5&id=${id}&tab=compare&at=451&from=303`);
  await wait(other, ".diff thead", "revision 303");
  const overflow = await other.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  assert.ok(overflow <= 0, `${width}: the page is ${overflow} pixels too wide`);
  await inspect(other, `${width} ${scheme}`);
  await screenshot(other, `compare-${width}-${scheme}`);
  const views = { yaml: `namespace=shop&kind=5&id=${id}`, life: `id=${id}&tab=life`, search: "q=web-1", deleted: "view=deleted", backup: "view=backup" };
  for (const [name, hash] of Object.entries(views)) {
    await other.evaluate((hash) => (location.hash = hash), hash);
    await wait(other, name === "yaml" ? "#detail" : name === "life" ? ".life" : "#list", { yaml: "kind: Deployment", life: "created", search: "web-1", deleted: "web-3", backup: "6 snapshots" }[name]);
    const overflow = await other.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    assert.ok(overflow <= 0, `${name} ${width}: the page is ${overflow} pixels too wide`);
    await inspect(other, `${name} ${width} ${scheme}`);
    if (width === 390) await screenshot(other, `${name}-${width}-${scheme}`);
  }
  await other.context().close();
}

await browser.close();
assert.deepEqual(problems, []);
console.log(JSON.stringify([...commands]));
