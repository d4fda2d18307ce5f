"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, within = document) => Array.from(within.querySelectorAll(selector));

  // ---------------------------------------------------------------- tables: sorted by a column, filtered by name

  const shownNumber = (text) => {
    const found = text.replaceAll(",", "").match(/[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return found && /^[-+\d.]/.test(text.trim()) ? Number(found[0]) : null;
  };
  const compared = (a, b) => {
    const [x, y] = [shownNumber(a), shownNumber(b)];
    return x !== null && y !== null ? x - y : a.localeCompare(b, "en", { numeric: true });
  };
  const sorted = (table, column, direction) => {
    const body = table.tBodies[0];
    const rows = all("tr", body);
    const text = (row) => row.cells[column].textContent.trim();
    rows.sort((a, b) => {
      const [x, y] = [text(a), text(b)];
      if (!x || !y) return (x ? 0 : 1) - (y ? 0 : 1); // what is not known stands last, either way
      return direction * compared(x, y);
    });
    body.append(...rows);
  };
  for (const table of all("table.sortable")) {
    const headings = all("thead th", table);
    headings.forEach((heading, column) => {
      const button = heading.querySelector("button");
      button.addEventListener("click", () => {
        const up = heading.getAttribute("aria-sort") !== "ascending";
        headings.forEach((other) => other.setAttribute("aria-sort", "none"));
        heading.setAttribute("aria-sort", up ? "ascending" : "descending");
        sorted(table, column, up ? 1 : -1);
      });
    });
  }
  for (const field of all("input[data-filters]")) {
    const rows = all("tbody tr", document.getElementById(field.dataset.filters));
    const count = document.getElementById(`${field.id}-count`);
    field.addEventListener("input", () => {
      const wanted = field.value.trim().toLowerCase();
      const kept = rows.filter((row) => {
        row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
        return !row.hidden;
      });
      count.textContent = `${kept.length} of ${rows.length} shown`;
    });
  }

  // ---------------------------------------------------------------- data to keep

  const save = (name, kind, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    let text = String(value);
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // no spreadsheet takes a name for a formula
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = (name) => {
    const { headings, columns } = data.tables[name];
    const values = columns.map((column) => (column.words ? column.at.map((number) => column.words[number]) : column));
    const rows = values.length ? values[0].map((_, row) => values.map((column) => column[row])) : [];
    return [headings, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  };
  for (const button of all("button[data-csv]")) button.addEventListener("click", () => save(`${button.dataset.csv}.csv`, "text/csv", csv(button.dataset.csv)));
  for (const button of all("button[data-json]")) button.addEventListener("click", () => save("report.json", "application/json", JSON.stringify(data, null, 1)));
  window.report = { data, csv };

  // ---------------------------------------------------------------- figures: the name of what is pointed at

  const tip = document.getElementById("tip");
  const clear = () => {
    tip.textContent = "";
    for (const drawing of all(".drawing.dim")) drawing.classList.remove("dim");
    for (const group of all("[data-series].lit")) group.classList.remove("lit");
  };
  const light = (drawing, number, x, y) => {
    clear();
    drawing.classList.add("dim");
    for (const group of all(`[data-series="${number}"]`, drawing)) group.classList.add("lit");
    tip.textContent = data.tables[drawing.dataset.of].series[number] ?? "";
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, window.innerWidth - box.width - 4))}px`;
    tip.style.top = `${Math.max(4, y - box.height - 10)}px`;
  };
  // The points of a line, or where its marks stand, in the units of its drawing.
  const pointsOf = (group) => {
    const marks = all("use", group).map((use) => [Number(use.getAttribute("x")), Number(use.getAttribute("y"))]);
    const lines = all("path", group).filter((path) => !path.closest("defs")).map((path) =>
      Array.from(path.getAttribute("d").matchAll(/(-?[\d.]+) (-?[\d.]+)/g), (found) => [Number(found[1]), Number(found[2])]));
    return [...lines, ...marks.map((mark) => [mark])];
  };
  const away = ([x, y], [ax, ay], [bx, by]) => {
    const [dx, dy] = [bx - ax, by - ay];
    const along = Math.max(0, Math.min(1, ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1)));
    return Math.hypot(x - ax - along * dx, y - ay - along * dy);
  };
  const NEAR = 8; // in the drawing's units, about 11 pixels
  for (const drawing of all(".drawing[data-of]")) {
    let lines = null;
    const count = data.tables[drawing.dataset.of].series.length;
    let at = -1;
    const pointed = (event) => {
      lines ??= all("[data-series]", drawing).flatMap((group) => pointsOf(group).map((points) => [group.dataset.series, points]));
      const svg = drawing.querySelector("svg");
      const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let [best, nearest] = [null, NEAR];
      for (const [series, points] of lines) {
        for (let i = 0; i < points.length; i += 1) {
          const distance = away([place.x, place.y], points[i], points[Math.min(i + 1, points.length - 1)]);
          if (distance < nearest) [best, nearest] = [series, distance];
        }
      }
      if (best !== null) light(drawing, best, event.clientX, event.clientY);
      else clear();
    };
    drawing.addEventListener("pointermove", pointed);
    drawing.addEventListener("pointerdown", pointed);
    drawing.addEventListener("pointerleave", clear);
    drawing.addEventListener("blur", clear);
    drawing.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") clear();
      if (!step || !count) return;
      event.preventDefault();
      at = (at + step + count) % count;
      const box = drawing.getBoundingClientRect();
      light(drawing, at, box.left, Math.max(40, box.top + 10));
    });
  }

  // ---------------------------------------------------------------- links open what they point at; all is open in print

  const opened = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  window.addEventListener("hashchange", opened);
  opened();
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = all("details.run:not([open])");
    for (const details of closed) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of closed) details.open = false;
  });

  // ---------------------------------------------------------------- while runs go on

  const going = document.getElementById("going");
  if (going) setInterval(() => { if (going.checked) location.reload(); }, 15000);
})();
