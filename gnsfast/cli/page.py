# SPDX-License-Identifier: Apache-2.0
"""The HTML around the figures, with its style and script: one file, which opens offline."""

import string

PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<h1>$title</h1>
$live
<div class="runs">
$runs
</div>
$sections
<footer>$footer</footer>
$figures
</body>
</html>
""")

FIGURES = string.Template("""<script type="application/json" id="data">$data</script>
<script>$plotly</script>
<script>$script</script>
""")

STYLE = """
:root { --ink: #1c1e21; --soft: #5b6167; --line: #dfe2e5; --ground: #fff; --card: #f7f8f9;
  --alert: #b34700; --alertground: #fdf0e6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --soft: #9aa2aa; --line: #363b41; --ground: #15171a; --card: #1e2125;
    --alert: #ffa366; --alertground: #33231a; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink);
  background: var(--ground); max-width: 1160px; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1, h2, h3, p, dd, pre { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .2rem 0 .8rem; }
h2 { font-size: 1.08rem; margin: 0; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; font-weight: 600; }
p { margin: .2rem 0 .5rem; }
.note, footer, dt, .live { color: var(--soft); font-size: .9rem; }
.note { max-width: 80ch; }
.runs { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.run { background: var(--card); border-radius: 10px; padding: .8rem 1rem; min-width: 0; }
.run > h2 { display: flex; gap: .55rem; align-items: center; }
.chip { flex: none; width: 1.5rem; height: 0; border-top: 4px solid; }
.state { color: var(--soft); font-weight: 400; font-size: .85rem; margin-left: auto;
  white-space: nowrap; }
dl { display: grid; gap: .35rem 1.2rem; margin: .5rem 0 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 230px), 1fr)); }
dt { line-height: 1.3; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
dd small { font-weight: 400; font-size: .9rem; }
.alert { background: var(--alertground); color: var(--alert); border-radius: 8px;
  padding: .5rem .8rem; margin: .6rem 0 0; }
section { margin: 1.8rem 0 0; min-width: 0; }
.pair { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.figure { margin: .3rem 0 0; }
.measured { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; list-style: none; padding: 0;
  margin: .2rem 0; font-size: .88rem; }
.legend i { display: inline-block; width: 1.6rem; border-top: 3px solid; vertical-align: middle; }
.pair > section { display: flex; flex-direction: column; }
.pair .figure { margin-top: auto; }
details { margin: .3rem 0; }
table { border-collapse: collapse; margin: .4rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
.decisions td:last-child { white-space: normal; }
th { color: var(--soft); font-weight: 400; font-size: .9rem; }
td.warning { color: var(--alert); }
ul { margin: .4rem 0; padding-left: 1.2rem; }
pre { background: var(--card); padding: .8rem; border-radius: 8px; white-space: pre-wrap;
  font-size: .85rem; }
summary { cursor: pointer; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .8rem; }
.live b { color: #009e73; }
@media (max-width: 640px) {
  .decisions thead { display: none; }
  .decisions tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .decisions td { display: inline; border: 0; padding: 0 .7rem 0 0; white-space: normal; }
  .decisions td:last-child { display: block; color: var(--soft); padding: 0; }
  .decisions td:first-child { font-weight: 600; }
  .decisions td:empty { display: none; }
  .decisions td[title]::before { content: attr(title) " "; color: var(--soft); }
  .decisions td.warning:last-child { color: var(--alert); }
  th, td { padding-right: .8rem; font-size: .92rem; }
}
"""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const key = "gnsfast " + location.pathname;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const saved = JSON.parse(sessionStorage.getItem(key) || "{}");
  const zoomed = saved.zoomed || {};

  function themed() {
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue("--ink"), ground = css.getPropertyValue("--card");
    return {"font.color": ink, "hoverlabel.font.color": ink, "hoverlabel.bgcolor": ground};
  }

  function draw(spec, k) {
    const box = document.getElementById("figure-" + k);
    const layout = Object.assign({
      font: {family: getComputedStyle(document.body).fontFamily, size: 12},
      hoverlabel: {namelength: -1, align: "left"},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: {l: 42, r: 14, t: 10, b: 42}, dragmode: touch ? false : "zoom",
    }, spec.layout);
    Plotly.newPlot(box, spec.data, layout, {displayModeBar: false, responsive: true});
    Plotly.relayout(box, themed());
    if (zoomed[k]) Plotly.relayout(box, zoomed[k]);
    box.on("plotly_relayout", (change) => {
      if (!Object.keys(change).some((name) => name.includes("axis"))) return;
      zoomed[k] = {};
      for (const axis of ["xaxis", "yaxis"])
        zoomed[k][axis + ".range"] = box._fullLayout[axis].range.slice();
    });
    box.on("plotly_doubleclick", () => setTimeout(() => delete zoomed[k], 0));
  }

  data.figures.forEach(draw);
  dark.addEventListener("change", () => {
    data.figures.forEach((_, k) => Plotly.relayout("figure-" + k, themed()));
  });

  const details = [...document.querySelectorAll("details")];
  if (saved.open) details.forEach((d, k) => { d.open = saved.open.includes(k); });
  const line = document.getElementById("live");
  if (saved.scroll) scrollTo(0, saved.scroll);
  if (!data.live) {
    sessionStorage.removeItem(key);
    return;
  }

  history.scrollRestoration = "manual";
  let pressed = false;
  addEventListener("pointerdown", () => { pressed = true; });
  addEventListener("pointerup", () => { pressed = false; });
  addEventListener("pointercancel", () => { pressed = false; });
  const opened = Date.now();
  const timer = setInterval(() => {
    if (Date.now() - data.live.written > 1000 * data.live.stale) {
      line.textContent = "Not rewritten since " + new Date(data.live.written).toLocaleTimeString()
        + ": gnsfast report --live has stopped. Reload to look again.";
      clearInterval(timer);
    } else if (Date.now() - opened > 1000 * data.live.refresh && !document.hidden && !pressed) {
      const open = details.map((d, k) => d.open ? k : -1).filter((k) => k >= 0);
      sessionStorage.setItem(key, JSON.stringify({scroll: scrollY, zoomed, open}));
      location.reload();
    }
  }, 1000);
})();
"""
