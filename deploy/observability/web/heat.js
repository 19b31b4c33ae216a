// Loads by layer, relative to an even share.
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
  return { left: 34, cellWidth: width / Math.max(columns, 1), cellHeight: height / Math.max(rows, 1) };
}

function drawHeat(id, field, columns, labels) {
  const canvas = $(id);
  canvas.parentElement.style.height = `${Math.max(250, 4 * heat.layers.length + 18)}px`;
  const [context, , height] = open(canvas);
  const place = geometry(canvas, heat.layers.length, columns, 18), paint = heatColours();
  const numbers = columns <= RANKS_NUMBERED && heat.layers.length <= LAYERS_NUMBERED && place.cellHeight > 12;
  const gap = place.cellWidth > 6 && place.cellHeight > 6 ? 1 : 0;
  const step = Math.ceil(14 / place.cellHeight), text = colour("text"), none = colour("none");
  context.textBaseline = "middle";
  heat.layers.forEach((layer, row) => {
    const values = layer[field], y = Math.round(row * place.cellHeight);
    const tall = Math.round((row + 1) * place.cellHeight) - y - gap;
    for (let i = 0; i < columns; i += 1) {
      const x = Math.round(place.left + i * place.cellWidth);
      context.fillStyle = values.length ? paint(values[i]) : none;
      context.fillRect(x, y, Math.round(place.left + (i + 1) * place.cellWidth) - x - gap, tall);
      if (numbers && values.length) {
        const far = Math.abs(values[i] - 1) > 0.6;
        context.fillStyle = far ? "#fff" : text;
        context.textAlign = "center";
        context.fillText(values[i].toFixed(2), x + place.cellWidth / 2, y + place.cellHeight / 2);
      }
    }
    if (row % step === 0) {
      context.fillStyle = colour("quiet");
      context.textAlign = "right";
      context.fillText(String(layer.layer), place.left - 6, Math.max(6, y + place.cellHeight / 2));
    }
  });
  context.fillStyle = colour("quiet");
  const every = Math.ceil(34 / place.cellWidth);
  for (let i = 0; i < columns; i += every) {
    context.textAlign = "center";
    context.fillText(labels(i), place.left + (i + 0.5) * place.cellWidth, height - 8);
  }
}

/** Why there is no heat map, in its place; "" for one that is to be drawn. */
function note(id, text) {
  for (const part of $(id).closest("section").children) {
    if (!part.matches("h2, .readout")) part.hidden = Boolean(text);
  }
  if (text) $(`${id}-readout`).textContent = text;
}

function drawHeats() {
  const missing = !last || !last.has_mesh ? "This server runs in one process: hits are not counted."
    : !heat ? "The mesh does not answer."
    : !heat.layers.some((layer) => layer.spread.length) ? "No hits yet. The ledger looks every 10 s." : "";
  for (const id of ["heat", "spread"]) note(id, missing);
  if (missing) return;
  const ranks = heat.seats.length, columns = Math.max(...heat.layers.map((layer) => layer.spread.length));
  drawHeat("heat", "ranks", ranks, (i) => (ranks > 4 ? String(i) : heat.seats[i]));
  drawHeat("spread", "spread", columns, (i) => String(Math.floor(i * heat.experts / columns) + 1));
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
  const row = Math.floor((event.clientY - box.top) / place.cellHeight);
  const at = Math.floor((event.clientX - box.left - place.left) / place.cellWidth);
  const layer = heat.layers[row];
  if (!layer || at < 0 || at >= layer[field].length) { summary(); return; }
  $(`${id}-readout`).textContent = `layer ${layer.layer}, ${name(at, columns)}: ${layer[field][at].toFixed(2)} × an even share`;
}
