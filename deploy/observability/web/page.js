// Asks for data while somebody looks.
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
  const first = Math.floor(at * heat.experts / columns) + 1, end = Math.floor((at + 1) * heat.experts / columns);
  return end > first ? `experts ${first} to ${end} by hits` : `expert ${first} by hits`;
};
$("heat").addEventListener("pointermove", (event) => readCell("heat", "ranks", (at) => heat.seats[at], event));
$("spread").addEventListener("pointermove", (event) => readCell("spread", "spread", experts, event));
for (const id of ["heat", "spread"]) $(id).addEventListener("pointerleave", () => heat && summary());
refresh();
