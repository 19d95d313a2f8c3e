// System metrics by kind: one chart for all GPUs and nodes, with its unit. One rank samples each node, so a node's metric is requested
// by that rank: `system/cpu@8`.
export interface Kind { id: string; keys: string[] }

const GPU = /^(system\/gpu\/)(\d+)(\/[^@]+)(@\d+)?$/;
const ENDINGS: [RegExp, string][] = [[/_gb$/, 'GB'], [/_mb_s$/, 'MB/s'], [/_w$/, 'W'], [/_c$/, '°C'], [/_mhz$/, 'MHz'], [/\/process\/cpu$/, '% of one core'],
  [/^system\/(cpu|memory|disk)$|\/(util|memory|sm_active|sm_occupancy|tensor_active|dram_active)$/, '%']];

/** Return the unit of a system metric; '' for counts and for other metrics. */
export function unitOf(key: string): string {
  const name = key.replace(/@\d+$/, '');
  return name.startsWith('system/') ? (ENDINGS.find(([ending]) => ending.test(name))?.[1] ?? '') : '';
}

/** Return what the chart of a kind is called: `system/gpu/util · %`. */
export const kindName = (id: string) => `${id.replace('/\\d+/', '/')}${unitOf(id) ? ` · ${unitOf(id)}` : ''}`;

/** Return the metrics of all GPUs by kind, each with the rule that matches them; other system metrics alone. In the order of the keys. */
export function kinds(keys: string[]): Kind[] {
  const found = new Map<string, string[]>();
  for (const key of keys) {
    const gpu = GPU.exec(key), id = gpu ? `${gpu[1]}\\d+${gpu[3]}` : key.replace(/@\d+$/, '');
    const list = found.get(id);
    if (list) list.push(key);
    else found.set(id, [key]);
  }
  return [...found].map(([id, list]) => ({ id, keys: list.sort((a, b) => place(a) - place(b)) }));
}
const place = (key: string) => Number(/@(\d+)$/.exec(key)?.[1] ?? 0) * 1000 + Number(GPU.exec(key)?.[2] ?? 0);

/** Return the metrics for each node of a run; `nodes` maps a node to the rank that samples it. */
export function onNodes(keys: string[], nodes: Record<string, number>): string[] {
  const ranks = Object.values(nodes);
  return ranks.length < 2 ? keys : keys.flatMap((key) => ranks.map((rank) => `${key}@${rank}`));
}

/** Return the label of a line in such a chart: `gpu 3`, `node-b`, `node-b gpu 3`. */
export function lineName(key: string, nodes: Record<string, number>): string {
  const rank = /@(\d+)$/.exec(key)?.[1], node = rank === undefined ? '' : (Object.entries(nodes).find(([, one]) => one === Number(rank))?.[0] ?? `rank ${rank}`);
  const gpu = GPU.exec(key)?.[2];
  return [node, gpu === undefined ? '' : `gpu ${gpu}`].filter(Boolean).join(' ') || key;
}

/** Arrange the system metrics in the sections of a page by kind; `alone` tells which have a chart of their own. */
export function arranged(sections: [string, string[]][], alone: (key: string) => boolean) {
  const keys = sections.find(([name]) => name === 'system')?.[1] ?? [], all = kinds(keys.filter(alone));
  const plots = new Map(all.map(({ id, keys }) => [keys[0], { id, keys, title: kindName(id), called: keys.length > 1 ? (key: string) => lineName(key, {}) : undefined }]));
  const found = sections.map(([name, list]): [string, string[]] => [name, name === 'system' ? list.filter((key) => plots.has(key) || !alone(key)) : list]);
  return { plots, found, rules: new Set(all.filter(({ keys }) => keys.length > 1).map(({ id }) => id)) };
}
