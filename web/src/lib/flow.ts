// Sections of one chart each flow together: a heading for every chart would leave most of the page empty.
const APART = ['pinned', 'system'];

/** Put the only charts of their sections into one section, where the first of them was; charts without a section are there, too. */
export function flow<T>(sections: [string, T[]][], together = 'metrics'): [string, T[]][] {
  const alone = (name: string, charts: T[]) => charts.length === 1 && !APART.includes(name);
  const joined = sections.filter(([name, charts]) => name === together || alone(name, charts));
  if (joined.length < 2) return sections;
  const charts = joined.flatMap(([, list]) => list);
  return sections.flatMap((section): [string, T[]][] => (section === joined[0] ? [[together, charts]] : joined.includes(section) ? [] : [section]));
}
