// Boxes and masks logged with an image, in the common formats: fanfold's, COCO's and W&B's.

export interface Box { x: number; y: number; w: number; h: number; label: string; score: number | null }
export interface Mask { wide: number; high: number; data: Uint8Array; labels: Record<string, string> }
export interface Polygon { points: [number, number][]; label: string }
type Facts = Record<string, unknown>;
const MOST = 1000, PIXELS = 1 << 24;

const facts = (value: unknown): Facts | null => (value && typeof value === 'object' && !Array.isArray(value) ? (value as Facts) : null);
const finite = (value: unknown): value is number => typeof value === 'number' && Number.isFinite(value);
const four = (value: unknown): number[] | null => (Array.isArray(value) && value.length === 4 && value.every(finite) ? value : null);

/** Return annotations as a list, each with its class names. Accepts a list, a single one, or named sets (`{"predictions": {"box_data": […]}}`). */
function each(noted: unknown, inner: string): { one: Facts; labels: Facts }[] {
  if (Array.isArray(noted)) return noted.slice(0, MOST).flatMap((one) => (facts(one) ? [{ one: facts(one)!, labels: labelsOf(facts(one)!) }] : []));
  const given = facts(noted);
  if (!given) return [];
  const sets = Object.values(given).flatMap((one) => (facts(one) && inner in facts(one)! ? [facts(one)!] : []));
  if (!sets.length) return [{ one: given, labels: labelsOf(given) }];
  return sets.flatMap((set) => (Array.isArray(set[inner]) && inner === 'box_data' ? (set[inner] as unknown[]).slice(0, MOST).flatMap((one) => (facts(one) ? [{ one: facts(one)!, labels: labelsOf(set) }] : [])) : [{ one: set, labels: labelsOf(set) }]));
}
const labelsOf = (one: Facts): Facts => facts(one.labels) ?? facts(one.class_labels) ?? {};

/** Return boxes in image pixels; coordinates from 0 to 1 are fractions of its size. */
export function boxesOf(noted: unknown, wide: number, high: number): Box[] {
  return each(noted, 'box_data').flatMap(({ one, labels }) => {
    const at = corners(one);
    if (!at) return [];
    const pixels = one.domain === 'pixel' || at.some((n) => Math.abs(n) > 1);
    const [kx, ky] = pixels ? [1, 1] : [wide, high];
    const id = one.label ?? one.class ?? one.caption ?? one.box_caption ?? labels[String(one.class_id)] ?? one.category ?? one.class_id;
    const score = one.score ?? one.confidence ?? Object.values(facts(one.scores) ?? {})[0];
    return [{ x: at[0] * kx, y: at[1] * ky, w: at[2] * kx, h: at[3] * ky, label: id === undefined || id === null ? '' : String(id), score: finite(score) ? score : null }];
  });
}

function corners(one: Facts): number[] | null {
  const given = facts(one.position) ?? one;
  const middle = given.middle;
  if (Array.isArray(middle) && middle.every(finite) && finite(given.width) && finite(given.height)) return [middle[0] - given.width / 2, middle[1] - given.height / 2, given.width, given.height];
  const edges = four([given.minX, given.minY, given.maxX, given.maxY]) ?? four(one.box) ?? four(one.xyxy);
  if (edges) return [edges[0], edges[1], edges[2] - edges[0], edges[3] - edges[1]];
  return four(one.bbox) ?? four(one.xywh) ?? four([one.x, one.y, one.width ?? one.w, one.height ?? one.h]);
}

/** Return masks as a class per pixel, from rows of numbers or from COCO's column-major run lengths. */
export function masksOf(noted: unknown): Mask[] {
  return each(noted, 'mask_data').flatMap(({ one, labels }) => {
    const named = Object.fromEntries(Object.entries(labels).map(([id, name]) => [id, String(name)]));
    const rows = one.data ?? one.mask_data ?? one.mask;
    if (Array.isArray(rows) && Array.isArray(rows[0])) return dense(rows as unknown[][], named);
    return runLength(one, named);
  });
}

function dense(rows: unknown[][], labels: Record<string, string>): Mask[] {
  const [high, wide] = [rows.length, rows[0].length], data = new Uint8Array(high * wide);
  rows.forEach((row, y) => { if (Array.isArray(row)) for (let x = 0; x < wide; x++) data[y * wide + x] = Number(row[x]) || 0; });
  return wide ? [{ wide, high, data, labels }] : [];
}

function runLength(one: Facts, labels: Record<string, string>): Mask[] {
  const { counts, size } = one;
  if (!Array.isArray(counts) || !Array.isArray(size) || size.length !== 2 || !counts.every((n) => Number.isInteger(n) && n >= 0)) return [];
  const [high, wide] = size as number[];
  if (!(high > 0 && wide > 0 && high * wide <= PIXELS)) return [];
  const data = new Uint8Array(high * wide);
  let at = 0;
  (counts as number[]).forEach((count, i) => { for (let k = 0; k < count && at < data.length; k++, at++) if (i % 2) data[(at % high) * wide + Math.floor(at / high)] = 1; });
  const label = one.label ?? one.class ?? one.category;
  return [{ wide, high, data, labels: label === undefined ? labels : { 1: String(label), ...labels } }];
}

/** Return polygons, from `polygon: [[x, y], …]` or COCO's `segmentation: [[x, y, x, y, …]]`. */
export function polygonsOf(noted: unknown, wide: number, high: number): Polygon[] {
  return each(noted, 'mask_data').flatMap(({ one }) => {
    const given = one.polygon ?? one.segmentation;
    if (!Array.isArray(given)) return [];
    const lists = given.every((part) => Array.isArray(part) && part.length === 2) ? [given.flat()] : given.every(Array.isArray) ? given : [given];
    const label = String(one.label ?? one.class ?? one.category ?? '');
    return lists.flatMap((flat: unknown) => {
      if (!Array.isArray(flat) || flat.length < 6 || !flat.every(finite)) return [];
      const share = flat.every((n) => n >= 0 && n <= 1);
      return [{ label, points: Array.from({ length: flat.length >> 1 }, (_, i): [number, number] => [flat[2 * i] * (share ? wide : 1), flat[2 * i + 1] * (share ? high : 1)]) }];
    });
  });
}

/** Return the classes in order of appearance: each has one color in all annotations of an image. */
export function classesOf(boxes: Box[], masks: Mask[], polygons: Polygon[]): string[] {
  const found = new Set<string>([...boxes.map((one) => one.label), ...polygons.map((one) => one.label)]);
  for (const mask of masks) for (const id of new Set(mask.data)) if (id) found.add(mask.labels[id] ?? String(id));
  return [...found];
}
