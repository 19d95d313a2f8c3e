// Merges sections of a single chart: a heading for every chart would leave most of the page empty.
const APART = ['pinned', 'system'];

/** Merge all single-chart sections, and the charts without a section, into one section at the position of the first. */
export function flow<T>(sections: [string, T[]][], together = 'metrics'): [string, T[]][] {
  const alone = (name: string, charts: T[]) => charts.length === 1 && !APART.includes(name);
  const joined = sections.filter(([name, charts]) => name === together || alone(name, charts));
  if (joined.length < 2) return sections;
  const charts = joined.flatMap(([, list]) => list);
  return sections.flatMap((section): [string, T[]][] => (section === joined[0] ? [[together, charts]] : joined.includes(section) ? [] : [section]));
}
