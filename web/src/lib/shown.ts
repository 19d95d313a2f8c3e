// Which runs are hidden from charts: a list of them, or `*` and a list of those that are not. Whichever is shorter is kept, so
// that a view of three runs out of ten thousand names three.
export const ALL = '*';
const MOST = 1000; // names in a view; beyond, everything is hidden

export interface Hidden { has: (id: string) => boolean; size: number }

export function hiding(list: string[]): Hidden {
  const named = new Set(list);
  if (!named.delete(ALL)) return named;
  return { has: (id) => !named.has(id), size: Infinity };
}

/** Hide some of all runs, or show them. One run is hidden and shown by naming it: `toggle(view.hidden, id)`. */
export function hide(list: string[], every: string[], ids: Iterable<string>, on: boolean): string[] {
  const before = hiding(list), changed = new Set(ids);
  const hidden = new Set(every.filter((id) => (changed.has(id) ? on : before.has(id))));
  if (2 * hidden.size <= every.length && hidden.size <= MOST) return [...hidden];
  const shown = every.filter((id) => !hidden.has(id));
  return shown.length <= MOST ? [ALL, ...shown] : on ? [ALL] : [];
}
