"use strict";
// Draws what GET /dashboard/data says. No library; texts reach the page as text only.
(() => {
  const $ = (id) => document.getElementById(id);
  const address = location.pathname.replace(/\/+$/, "") + "/data";
  const LAYERS_NUMBERED = 16, RANKS_NUMBERED = 8;

  let points = [], column = {}, heat = null, last = null;
  let timer = 0, failedSince = 0, hovered = null;

  // --- small things -------------------------------------------------------------------------

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function number(value, digits = 3) {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    if (Math.abs(value) >= 1e6) return `${(value / 1e6).toPrecision(digits)} M`;
    if (Math.abs(value) >= 1e4) return `${(value / 1e3).toPrecision(digits)} k`;
    if (Math.abs(value) >= 100) return Math.round(value).toString();
    return Number(value.toPrecision(digits)).toString();
  }

  function seconds(value) {
    if (value === null || value === undefined) return ["–", ""];
    if (value === 0) return ["0", ""];
    if (value < 1e-3) return [number(value * 1e6, 2), "µs"];
    if (value < 1) return [number(value * 1e3, value < 0.1 ? 2 : 3), "ms"];
    return [number(value), "s"];
  }

  function bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
    return `${at ? value.toPrecision(3) : value} ${units[at]}`;
  }

  const time = (value) => seconds(value).join(" ").trim();
  const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`);
  const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const get = (point, name) => point[column[name]];

  // --- canvas -------------------------------------------------------------------------------

  /** A canvas at the screen's resolution, cleared; [context, width, height] in CSS pixels. */
  function open(canvas) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    return [context, width, height];
  }

  /** A round number not below value: 1, 2 or 5 times a power of ten. */
  function ceiling(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
  }

  function path(context, names, name, x, y) {
    let drawing = false;
    context.beginPath();
    for (const point of names) {
      const value = get(point, name);
      if (value === null) { drawing = false; continue; }
      if (drawing) context.lineTo(x(get(point, "t")), y(value));
      else context.moveTo(x(get(point, "t")), y(value));
      drawing = true;
    }
    context.stroke();
  }

  const CHARTS = {
    tokens: { series: [["generated", "generated"], ["prompt", "prompt"]], show: (v) => number(v), fill: true },
    ttft: { series: [["ttft50", "median"], ["ttft95", "95 %"]], show: time },
    itl: { series: [["itl50", "median"], ["itl95", "95 %"]], show: time },
    load: { series: [["running", "running"], ["waiting", "waiting"], ["queued", "queued at the door"]], show: (v) => number(v), least: 4, fill: true },
    used: { series: [["pages", "pages"], ["slots", "slots"]], show: percent, top: 1 },
    ends: { series: [["answers", "answers"], ["errors", "server errors"], ["others", "client errors, cancels"]], show: (v) => number(v, 2), fill: true },
  };
  const PENS = ["one", "two", "three"];
  const LEFT = 46, BOTTOM = 16, TOP = 6;

  /** Minutes that charts show: as many as there are, on a round scale. */
  function minutes() {
    const held = points.length > 1 ? (get(points[points.length - 1], "t") - get(points[0], "t")) / 60 : 0;
    return [1, 2, 5].find((few) => few >= held * 0.98) || last.minutes;
  }

  function chart(id) {
    const { series, show, fill, top, least } = CHARTS[id];
    const [context, width, height] = open($(id));
    const plotHeight = height - BOTTOM - TOP, shown = minutes(), span = shown * 60;
    const end = points.length ? get(points[points.length - 1], "t") : Date.now() / 1000;
    let most = least || 0;
    for (const point of points) for (const [name] of series) most = Math.max(most, get(point, name) || 0);
    most = top || ceiling(most || 1);
    const x = (t) => LEFT + (width - LEFT - 2) * (1 - (end - t) / span);
    const y = (value) => TOP + plotHeight * (1 - Math.min(value, most) / most);

    context.lineWidth = 1;
    context.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      context.strokeStyle = colour("grid");
      context.beginPath();
      context.moveTo(LEFT, y(share * most));
      context.lineTo(width, y(share * most));
      context.stroke();
      context.fillStyle = colour("quiet");
      context.textAlign = "right";
      context.fillText(show(share * most), LEFT - 6, y(share * most));
    }
    for (const share of [1, 0.5, 0]) {
      const ago = share * shown;
      context.textAlign = share === 1 ? "left" : share ? "center" : "right";
      context.fillText(ago ? (ago < 1 ? `${ago * 60} s ago` : `${ago} min ago`) : "now", x(end - ago * 60), height - 6);
    }
    epochMarks(context, x, height - BOTTOM);
    series.forEach(([name], i) => {
      context.strokeStyle = colour(PENS[i]);
      context.lineWidth = 1.5;
      context.lineJoin = "round";
      path(context, points, name, x, y);
      if (fill && points.length > 1) {
        context.lineTo(x(end), y(0));
        context.lineTo(x(get(points[0], "t")), y(0));
        context.globalAlpha = 0.12;
        context.fillStyle = colour(PENS[i]);
        context.fill();
        context.globalAlpha = 1;
      }
    });
    const at = hovered === null ? points.length - 1 : nearest(end - (1 - hovered) * span);
    if (hovered !== null && at >= 0) {
      context.strokeStyle = colour("quiet");
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x(get(points[at], "t")), TOP);
      context.lineTo(x(get(points[at], "t")), height - BOTTOM);
      context.stroke();
    }
    legend(id, at);
  }

  function epochMarks(context, x, bottom) {
    context.strokeStyle = colour("warn");
    context.setLineDash([3, 3]);
    for (let i = 1; i < points.length; i += 1) {
      if (get(points[i], "epoch") === get(points[i - 1], "epoch")) continue;
      context.beginPath();
      context.moveTo(x(get(points[i], "t")), TOP);
      context.lineTo(x(get(points[i], "t")), bottom);
      context.stroke();
    }
    context.setLineDash([]);
  }

  function nearest(t) {
    let best = -1;
    points.forEach((point, i) => {
      if (best < 0 || Math.abs(get(point, "t") - t) < Math.abs(get(points[best], "t") - t)) best = i;
    });
    return best;
  }

  function legend(id, at) {
    const { series, show } = CHARTS[id];
    const parts = [];
    series.forEach(([name, label], i) => {
      parts.push(element("i", undefined, PENS[i]), label, element("b", at < 0 ? "–" : show(get(points[at], name))));
    });
    if (hovered !== null && at >= 0) parts.push(`at ${clock(get(points[at], "t"))}`);
    $(`${id}-legend`).replaceChildren(...parts);
  }

  function spark(canvas, name) {
    const [context, width, height] = open(canvas);
    const values = points.map((point) => get(point, name) || 0);
    const most = Math.max(...values, 1e-9), end = points.length ? get(points[points.length - 1], "t") : 0;
    context.strokeStyle = colour("one");
    context.lineWidth = 1.25;
    path(context, points, name, (t) => width * (1 - (end - t) / (60 * minutes())), (v) => height - 1.5 - (height - 3) * v / most);
  }

  // --- heat maps ----------------------------------------------------------------------------

  const channels = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));

  /** Colour of a relative load: blue below an even share, orange above, full from twice on. */
  function heatColours() {
    const [cold, even, hot] = ["cold", "even", "hot"].map((name) => channels(colour(name)));
    return (value) => {
      const share = Math.min(Math.abs(value - 1), 1), far = value < 1 ? cold : hot;
      return `rgb(${even.map((c, i) => Math.round(c + (far[i] - c) * share)).join(",")})`;
    };
  }

  /** Where a heat map's cells are. rows: layers; columns: of the widest layer. */
  function geometry(canvas, rows, columns, bottom) {
    const width = canvas.clientWidth - 34, height = canvas.clientHeight - bottom;
    return { left: 34, top: 0, cellWidth: width / Math.max(columns, 1), cellHeight: height / Math.max(rows, 1) };
  }

  function drawHeat(id, field, columns, labels) {
    const canvas = $(id), [context, , height] = open(canvas);
    const place = geometry(canvas, heat.layers.length, columns, 18), paint = heatColours();
    const numbers = columns <= RANKS_NUMBERED && heat.layers.length <= LAYERS_NUMBERED && place.cellHeight > 12;
    const gap = place.cellWidth > 6 && place.cellHeight > 6 ? 1 : 0;
    const step = Math.ceil(14 / place.cellHeight);
    context.textBaseline = "middle";
    heat.layers.forEach((layer, row) => {
      const values = layer[field], y = place.top + row * place.cellHeight;
      for (let i = 0; i < columns; i += 1) {
        const x = place.left + i * place.cellWidth;
        context.fillStyle = values.length ? paint(values[i]) : colour("none");
        context.fillRect(x, y, place.cellWidth - gap, place.cellHeight - gap);
        if (numbers && values.length) {
          const far = Math.abs(values[i] - 1) > 0.6;
          context.fillStyle = far ? "#fff" : colour("text");
          context.textAlign = "center";
          context.fillText(values[i].toFixed(2), x + place.cellWidth / 2, y + place.cellHeight / 2);
        }
      }
      if (row % step === 0) {
        context.fillStyle = colour("quiet");
        context.textAlign = "right";
        context.fillText(String(layer.layer), place.left - 6, y + place.cellHeight / 2);
      }
    });
    context.fillStyle = colour("quiet");
    const every = Math.ceil(34 / place.cellWidth);
    for (let i = 0; i < columns; i += every) {
      context.textAlign = "center";
      context.fillText(labels(i), place.left + (i + 0.5) * place.cellWidth, height - 8);
    }
  }

  function note(id, text) {
    const [context, width, height] = open($(id));
    context.fillStyle = colour("quiet");
    context.textAlign = "center";
    context.font = context.font.replace("11px", "13px");
    context.fillText(text, width / 2, height / 2);
  }

  function drawHeats() {
    const missing = !last || !last.has_mesh ? "This server runs in one process: hits are not counted."
      : !heat ? "The mesh does not answer."
      : !heat.layers.some((layer) => layer.spread.length) ? "No hits yet. The ledger looks every 10 s." : "";
    if (missing) {
      for (const id of ["heat", "spread"]) { note(id, missing); $(`${id}-readout`).textContent = missing; }
      return;
    }
    const ranks = heat.seats.length, columns = Math.max(...heat.layers.map((layer) => layer.spread.length));
    drawHeat("heat", "ranks", ranks, (i) => (ranks > 4 ? String(i) : heat.seats[i]));
    drawHeat("spread", "spread", columns, (i) => String(Math.round(i * heat.experts / columns) + 1));
    summary();
  }

  function summary() {
    const uneven = heat.layers.filter((layer) => layer.imbalance !== null);
    const worst = uneven.reduce((a, b) => (a && a.imbalance >= b.imbalance ? a : b), null);
    const mean = uneven.reduce((sum, layer) => sum + layer.imbalance, 0) / (uneven.length || 1);
    const dead = heat.layers.reduce((sum, layer) => sum + layer.dead, 0);
    const entropies = heat.layers.filter((layer) => layer.entropy !== null);
    const least = entropies.reduce((a, b) => (a && a.entropy <= b.entropy ? a : b), null);
    $("heat-readout").textContent = worst
      ? `largest over mean: ${mean.toFixed(2)} on average, ${worst.imbalance.toFixed(2)} in layer ${worst.layer}`
      + (heat.fan_out ? ` · ${heat.fan_out.toFixed(2)} actors per token` : "") : "";
    $("spread-readout").textContent = `${heat.experts} experts, top ${heat.top_k}`
      + (least ? ` · least entropy ${least.entropy.toFixed(3)} in layer ${least.layer}` : "")
      + ` · ${dead ? `${dead} dead` : "none dead"}`;
  }

  function heatTable() {
    const rows = heat.layers.map((layer) => {
      const busiest = layer.ranks.indexOf(Math.max(...layer.ranks));
      return [layer.layer, layer.imbalance === null ? "–" : layer.imbalance.toFixed(2),
        busiest < 0 ? "–" : `${heat.seats[busiest]} (${layer.ranks[busiest].toFixed(2)})`,
        layer.entropy === null ? "–" : layer.entropy.toFixed(3), layer.dead];
    });
    table("heat-table", ["layer", "largest / mean", "busiest", "entropy", "dead experts"], rows);
  }

  function readCell(id, field, name, event) {
    if (!heat || !heat.layers.length) return;
    const canvas = $(id), box = canvas.getBoundingClientRect();
    const columns = Math.max(...heat.layers.map((layer) => layer[field].length), 1);
    const place = geometry(canvas, heat.layers.length, columns, 18);
    const row = Math.floor((event.clientY - box.top - place.top) / place.cellHeight);
    const at = Math.floor((event.clientX - box.left - place.left) / place.cellWidth);
    const layer = heat.layers[row];
    if (!layer || at < 0 || at >= layer[field].length) { summary(); return; }
    $(`${id}-readout`).textContent = `layer ${layer.layer}, ${name(at, columns)}: ${layer[field][at].toFixed(2)} × an even share`;
  }

  // --- tables, tiles, lists -----------------------------------------------------------------

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
      const bars = engine.hot.map((one) => meter(one.of ? one.count / one.of : 0, `${one.count} / ${one.of}`, `${engine.name} ${one.kind} in use`));
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
    const sums = {};
    for (const engine of last.engines) for (const one of engine.hot || []) {
      const sum = sums[one.kind] = sums[one.kind] || { used: 0, total: 0 };
      sum.used += one.used;
      sum.total += one.total;
    }
    const names = { pages: "pages of MLA latents", snapshots: "snapshots of KDA state" };
    const rows = Object.entries(sums).map(([kind, sum]) => ["hot (device)", names[kind] || kind,
      meter(sum.total ? sum.used / sum.total : 0, percent(sum.total ? sum.used / sum.total : 0), `hot ${kind} in use`),
      bytes(sum.used), bytes(sum.total)]);
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

  // --- data ---------------------------------------------------------------------------------

  function take(data) {
    last = data;
    column = Object.fromEntries(data.columns.map((name, i) => [name, i]));
    const newest = points.length ? get(points[points.length - 1], "t") : 0;
    points = points.concat(data.points.filter((point) => point[0] > newest));
    const oldest = points.length ? get(points[points.length - 1], "t") - data.minutes * 60 : 0;
    points = points.filter((point) => get(point, "t") >= oldest);
    if (data.heat) heat = data.heat;
    head();
    membersTables();
    tiers();
    facts();
    draw();
    if (data.heat) heatTable();
  }

  async function refresh() {
    clearTimeout(timer);
    const since = points.length ? get(points[points.length - 1], "t") : 0;
    const query = new URLSearchParams({ since, heat: heat ? heat.version : "" });
    let pause = last ? last.period * 1000 : 2000;
    try {
      const answer = await fetch(`${address}?${query}`, { cache: "no-store" });
      if (answer.status === 401) { location.reload(); return; }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      take(await answer.json());
      failedSince = 0;
    } catch (error) {
      failedSince = failedSince || Date.now();
      $("state").textContent = `no answer for ${Math.round((Date.now() - failedSince) / 1000)} s`;
      $("state").className = "pill bad";
      $("reason").textContent = error instanceof TypeError ? "the server cannot be reached" : error.message;
      pause = 3000;
    }
    if (!document.hidden) timer = setTimeout(refresh, pause);
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) refresh();
  });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const id of Object.keys(CHARTS)) {
    $(id).addEventListener("pointermove", (event) => {
      const box = event.currentTarget.getBoundingClientRect();
      hovered = Math.min(1, Math.max(0, (event.clientX - box.left - LEFT) / (box.width - LEFT - 2)));
      Object.keys(CHARTS).forEach(chart);
    });
    $(id).addEventListener("pointerleave", () => { hovered = null; Object.keys(CHARTS).forEach(chart); });
  }
  const experts = (at, columns) => {
    const first = Math.round(at * heat.experts / columns) + 1, end = Math.round((at + 1) * heat.experts / columns);
    return end > first ? `experts ${first} to ${end} by hits` : `expert ${first} by hits`;
  };
  $("heat").addEventListener("pointermove", (event) => readCell("heat", "ranks", (at) => heat.seats[at], event));
  $("spread").addEventListener("pointermove", (event) => readCell("spread", "spread", experts, event));
  for (const id of ["heat", "spread"]) $(id).addEventListener("pointerleave", () => heat && summary());
  refresh();
})();
