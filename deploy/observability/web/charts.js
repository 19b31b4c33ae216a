// Lines over time.
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
  ends: { series: [["answers", "answers"], ["errors", "server errors"], ["others", "client side"]], show: (v) => number(v, 2), fill: true },
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
