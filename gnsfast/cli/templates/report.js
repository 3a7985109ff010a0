(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const key = "gnsfast " + location.pathname;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const saved = JSON.parse(sessionStorage.getItem(key) || "{}");
  const zoomed = saved.zoomed || {};

  // What all figures look like; the page's data say only what they show.
  const grid = {gridcolor: "rgba(128, 128, 128, 0.22)", zeroline: false, automargin: true};
  const bar = {orientation: "h", x: 0.5, y: 1, yanchor: "bottom", thickness: 10,
    len: 1, lenmode: "fraction", outlinewidth: 0};
  const template = {
    layout: {
      hovermode: "x unified", yaxis: grid,
      legend: {orientation: "h", x: 0, y: 1, yanchor: "bottom", itemsizing: "constant"},
      xaxis: Object.assign({exponentformat: "B", rangemode: "tozero", nticks: 6}, grid,
        {automargin: false}),
    },
    data: {heatmap: [{hoverongaps: false, colorscale: "Viridis", colorbar: bar}]},
  };

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
      template, margin: {l: 42, r: 14, t: 10, b: 42}, dragmode: touch ? false : "zoom",
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
