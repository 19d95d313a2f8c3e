// Saves a chart as an image with title and legend, or as the numbers it shows.
import { draw, type Line, type Look } from './chart';
import type { Frame, View } from './scale';
import { SvgContext } from './svg';

export interface Shown { title: string; axis: string; frame: Frame; view: View; lines: Line[]; look: Look; nameOf: (id: string) => string }
const HEAD = 26, ROW = 16, COLUMN = 220; // COLUMN: minimum width of a legend entry

export async function saveChart(kind: 'PNG' | 'SVG' | 'CSV', shown: Shown): Promise<void> {
  const name = fileName(shown.title);
  if (kind === 'CSV') return hand(`${name}.csv`, new Blob([csv(shown)], { type: 'text/csv' }));
  if (kind === 'SVG') return hand(`${name}.svg`, new Blob([svg(shown)], { type: 'image/svg+xml' }));
  const canvas = document.createElement('canvas');
  const [w, h] = size(shown);
  canvas.width = w * 2;
  canvas.height = h * 2;
  paint(canvas.getContext('2d')!, shown, 2);
  const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, 'image/png'));
  if (blob) hand(`${name}.png`, blob);
}

export const fileName = (title: string) => title.replace(/[^\w.=-]+/g, '_');

export function svg(shown: Shown): string {
  const [w, h] = size(shown);
  const context = new SvgContext(w, h);
  paint(context as unknown as CanvasRenderingContext2D, shown, 1);
  return context.text(shown.title);
}

const across = ({ frame }: Shown) => Math.max(1, Math.floor(frame.w / COLUMN));
const size = (shown: Shown) => [shown.frame.w, shown.frame.h + HEAD + Math.ceil(shown.lines.length / across(shown)) * ROW + 8];

/** Truncate a name to the available width. */
function fitted(g: CanvasRenderingContext2D, name: string, room: number): string {
  if (g.measureText(name).width <= room) return name;
  let short = name;
  while (short.length > 1 && g.measureText(`${short}…`).width > room) short = short.slice(0, -1);
  return `${short}…`;
}

function paint(g: CanvasRenderingContext2D, shown: Shown, dpr: number) {
  const { frame, view, lines, look, title, nameOf } = shown;
  const [w, h] = size(shown);
  draw(g, { ...frame, dpr }, view, lines, look);
  g.setTransform(dpr, 0, 0, dpr, 0, 0);
  g.fillStyle = look.ground;
  g.globalAlpha = 1;
  g.fillRect(0, frame.h, w, h - frame.h);
  g.fillStyle = look.ink;
  g.textAlign = 'left';
  g.textBaseline = 'top';
  g.fillText(`${title}  over ${shown.axis}`, 8, frame.h + 6);
  const columns = across(shown), wide = w / columns;
  [...lines].reverse().forEach((line, i) => { // all lines: a figure in a paper has no hover
    const x = 8 + (i % columns) * wide, y = frame.h + HEAD + Math.floor(i / columns) * ROW;
    g.strokeStyle = line.colour;
    g.lineWidth = 2.2;
    g.setLineDash(line.dash);
    g.beginPath();
    g.moveTo(x, y + 5);
    g.lineTo(x + 18, y + 5);
    g.stroke();
    g.fillStyle = look.ink;
    g.fillText(fitted(g, nameOf(line.run), wide - 36), x + 24, y);
  });
  g.setLineDash([]);
}

/** Return a float32 value with only the digits it holds: 0.01, not 0.009999999776482582. */
function said(column: ArrayLike<number>, i: number): number {
  const value = column[i];
  if (!(column instanceof Float32Array) || !Number.isFinite(value)) return value;
  for (let digits = 6; digits < 9; digits++) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === value) return short;
  }
  return value;
}

/** Return the lines of groups as CSV, one row per drawn point, and a header that says so. Names are quoted where needed, and those that
 * a spreadsheet would run as formulas get a leading apostrophe. */
export function csv({ axis, title, lines, nameOf }: Shown): string {
  const cell = (text: string) => (/[",\n\r]|^[=+\-@\t]/.test(text) ? `"${(/^[=+\-@\t]/.test(text) ? "'" : '') + text.replaceAll('"', '""')}"` : text);
  const rows = [['group', axis, `${title} (mean of the group as drawn, thinned)`, 'lowest', 'highest'].map(cell).join(',')];
  for (const line of [...lines].reverse())
    for (let i = 0; i < line.x.length; i++)
      rows.push([cell(nameOf(line.run)), line.x[i], said(line.y, i), said(line.low ?? line.lo ?? line.y, i), said(line.high ?? line.hi ?? line.y, i)].join(','));
  return rows.join('\n') + '\n';
}

export function hand(name: string, blob: Blob) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
