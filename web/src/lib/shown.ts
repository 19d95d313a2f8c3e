// The runs hidden from charts: a list of their ids, or `*` and the ids of the shown ones, whichever is shorter, so that a view of three
// runs out of ten thousand has three ids.
export const ALL = '*';
const MOST = 1000; // ids in a view; beyond, all runs are hidden or shown

export interface Hidden { has: (id: string) => boolean; size: number }

export function hiding(list: string[]): Hidden {
  const named = new Set(list);
  if (!named.delete(ALL)) return named;
  return { has: (id) => !named.has(id), size: Infinity };
}

/** Hide or show several runs. For a single run, use `toggle(view.hidden, id)`. */
export function hide(list: string[], every: string[], ids: Iterable<string>, on: boolean): string[] {
  const before = hiding(list), changed = new Set(ids);
  const hidden = new Set(every.filter((id) => (changed.has(id) ? on : before.has(id))));
  if (2 * hidden.size <= every.length && hidden.size <= MOST) return [...hidden];
  const shown = every.filter((id) => !hidden.has(id));
  return shown.length <= MOST ? [ALL, ...shown] : on ? [ALL] : [];
}
