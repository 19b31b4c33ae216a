// Tiles, tables and lists.
/** rows: cells as texts or elements. Numbers are set right. */
function table(id, head, rows) {
  const numeric = head.map((_, i) => rows.length > 0 && typeof rows[0][i] === "number");
  const top = element("tr");
  head.forEach((text, i) => {
    const cell = element("th", text, numeric[i] ? "number" : "");
    cell.scope = "col";
    top.append(cell);
  });
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr");
    row.forEach((value, i) => {
      const cell = element("td", undefined, numeric[i] ? "number" : "");
      cell.append(value instanceof Node ? value : String(value));
      line.append(cell);
    });
    body.append(line);
  }
  const header = element("thead");
  header.append(top);
  $(id).replaceChildren(header, body);
}

function meter(share, text, label) {
  const holder = element("span"), bar = element("meter");
  Object.assign(bar, { min: 0, max: 1, low: 0.8, high: 0.95, optimum: 0, value: share });
  bar.setAttribute("aria-label", label);
  holder.append(bar, text);
  return holder;
}

const status = (tone, text) => element("span", text, `dot ${tone}`);
const where = (row) => element("span", row && row.pid ? `${row.pid} on ${row.host}` : "", "where");

function membersTables() {
  const places = Object.fromEntries(last.members.attention.map((row) => [row.seat, row]));
  table("engines", ["seat", "state", "running", "waiting", "pages", "slots", "process"], last.engines.map((engine) => {
    const place = places[engine.name];
    const state = !engine.up ? status("bad", "down") : place && place.leaving ? status("warn", "leaving") : status("good", "up");
    if (!engine.hot) return [engine.name, state, 0, 0, "–", "–", where(place)];
    const bars = engine.hot.slice(0, 2).map((one) => meter(one.of ? one.count / one.of : 0, `${one.count} / ${one.of}`, `${engine.name} ${one.kind} in use`));
    return [engine.name, state, engine.running, engine.waiting, ...bars, where(place)];
  }));
  $("experts-empty").hidden = last.has_mesh;
  $("experts").hidden = !last.has_mesh;
  if (!last.has_mesh) return;
  table("experts", ["seat", "state", "busy", "rows/s", "weights", "process"], last.members.experts.map((row) => [
    row.seat,
    row.up === false ? status("bad", "down") : row.leaving ? status("warn", "leaving") : status("good", "up"),
    row.busy === undefined ? "–" : meter(row.busy, percent(row.busy), `${row.seat} busy`),
    row.rows === undefined ? "–" : Math.round(row.rows), bytes(row.bytes || 0), where(row),
  ]));
}

function tiers() {
  const sums = new Map();
  for (const engine of last.engines) for (const one of engine.tiers || []) {
    const key = `${one.tier} ${one.kind}`;
    const sum = sums.get(key) || { ...one, used: 0, total: 0, closed: "" };
    // A folder that engines share is told of by each of them.
    sum.used = one.shared ? Math.max(sum.used, one.used) : sum.used + one.used;
    sum.total = one.shared ? Math.max(sum.total, one.total) : sum.total + one.total;
    sum.closed = sum.closed || one.closed || "";
    sums.set(key, sum);
  }
  const places = { hot: "hot (device)", host: "warm (host)", disk: "cold (disk)" };
  const names = { pages: "pages of MLA latents", slots: "KDA state, running", snapshots: "KDA snapshots", sessions: "sessions" };
  const rows = [...sums.values()].map((sum) => {
    const share = sum.total ? sum.used / sum.total : 0;
    const bar = meter(share, percent(share), `${sum.tier} ${sum.kind} in use`);
    const place = sum.closed ? status("warn", `${places[sum.tier]}, closed: ${sum.closed}`) : places[sum.tier] || sum.tier;
    return [place, names[sum.kind] || sum.kind, bar, bytes(sum.used), bytes(sum.total)];
  });
  table("tiers", ["tier", "kind", "in use", "bytes", "room"], rows);
}

function tiles() {
  const now = points.length ? (name) => get(points[points.length - 1], name) : () => null;
  const mesh = last.mesh;
  const found = [
    ["Generated", number(now("generated")), "tok/s", `prompt ${number(now("prompt"))} tok/s`, "generated"],
    ["First token, 95 %", ...seconds(now("ttft95")), `median ${time(now("ttft50"))}`, "ttft95"],
    ["Between tokens, 95 %", ...seconds(now("itl95")), `median ${time(now("itl50"))}`, "itl95"],
    ["Running", number(now("running")), "", `${number(now("waiting"))} waiting · ${number(now("queued"))} queued`, "running"],
    ["Pages in use", percent(now("pages")), "", `slots ${percent(now("slots"))}`, "pages"],
    ["Prompt from cache", percent(now("cached")), "", "of the tokens looked up", "cached"],
    ["Server errors", number(now("errors"), 2), "/s", `${number(now("answers"), 2)} answers/s`, "errors"],
  ];
  if (mesh) found.push(["Epoch", String(mesh.epoch), "", `${mesh.failovers} failovers · ${mesh.losses} losses`, null]);
  const holder = $("tiles");
  if (holder.children.length !== found.length) {
    holder.replaceChildren(...found.map(() => {
      const tile = element("div", undefined, "tile");
      const value = element("p", undefined, "value");
      value.append(element("span"), element("small"));
      tile.append(element("h2"), value, element("p", undefined, "more"), element("canvas"));
      tile.lastChild.setAttribute("aria-hidden", "true");
      return tile;
    }));
  }
  found.forEach(([title, value, unit, more, series], i) => {
    const [head, shown, second, canvas] = holder.children[i].children;
    head.textContent = title;
    shown.children[0].textContent = value;
    shown.children[1].textContent = unit;
    second.textContent = more;
    if (series) spark(canvas, series);
  });
}

function facts() {
  const mesh = last.mesh, parts = [];
  const add = (name, value) => { const part = element("span", name); part.append(element("b", value)); parts.push(part, " "); };
  if (mesh) {
    add("routing version", mesh.routing_version);
    add("last recovery", mesh.last_recovery === null ? "–" : time(mesh.last_recovery));
    add("rebalances", `${mesh.rebalances.done || 0}${mesh.rebalancing ? " (one is running)" : ""}`);
    add("copies moved", mesh.moved);
    add("held", mesh.held);
  }
  $("mesh-facts").replaceChildren(...parts);
  const events = last.events || [];
  $("events").replaceChildren(...events.map((event) => {
    const line = element("li", undefined, `dot ${event.tone}`);
    line.append(element("time", clock(event.t)), element("span", event.text));
    return line;
  }));
  $("events-empty").textContent = !last.has_mesh ? "Without a mesh there are no epochs."
    : last.events === null ? "Events and processes are shown on this host, or with a key."
    : events.length ? "" : "Nothing has happened since this front door began to watch.";
}

function head() {
  const mesh = last.mesh, pill = $("state");
  const state = mesh && mesh.state !== "ready" ? mesh.state : last.ready ? "ready" : "not ready";
  pill.textContent = state;
  pill.className = `pill ${state === "ready" ? "good" : state === "recovering" ? "warn" : "bad"}`;
  $("reason").textContent = last.reason || (mesh ? mesh.reason : "");
  $("model").textContent = last.model;
  document.title = `${last.model}: ${state} – ExpertMesh`;
  const alarms = mesh ? Object.entries(mesh.alarms).filter(([, count]) => count).map(([kind, count]) => `${kind}: ${count}`) : [];
  const size = mesh ? `${mesh.members.attention} attention + ${mesh.members.expert} expert actors · ` : "one process · ";
  $("facts").textContent = (alarms.length ? `alarms ${alarms.join(", ")} · ` : "") + size + `version ${last.version}`;
}

function draw() {
  if (!last) return;
  tiles();
  Object.keys(CHARTS).forEach(chart);
  drawHeats();
}
