// Formats numbers, times and text for display. A value that cannot be shown is an empty string, never "NaN undefined".

/** Format a value for display: integers in full, other numbers to five significant digits. */
export const number = (value: unknown): string => (typeof value === 'number' ? rounded(value, 5) : text(value));
export function rounded(value: number, digits: number): string {
  if (Number.isNaN(value)) return 'NaN';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return minus(size < 1000 ? String(value) : whole.format(value));
  if (size >= 1e6 || size < 1e-3) return minus(Number(value.toPrecision(digits)).toExponential().replace('e+', 'e'));
  return minus(String(Number(value.toPrecision(digits))));
}

/** Format an axis label: short, with enough digits to distinguish ticks that are `apart` from each other. */
export function tick(value: number, apart = Infinity): string {
  const size = Math.abs(value);
  const digits = (unit: number) => Math.max(0, Math.min(12, Math.ceil(-Math.log10(apart / unit) - 1e-9)));
  const short = (n: number, unit: number) => (Number.isFinite(apart) ? Number(n.toFixed(digits(unit))) : Number(n.toPrecision(4)));
  if (size >= 1e12 || (size > 0 && size < 1e-3)) {
    const unit = 10 ** Math.floor(Math.log10(size));
    return minus(value.toExponential(Number.isFinite(apart) ? digits(unit) : 1).replace('e+', 'e').replace(/\.?0+e/, 'e'));
  }
  for (const [unit, sign] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']] as const) if (size >= unit && size >= 1e4) return minus(short(value / unit, unit) + sign);
  return minus(String(short(value, 1)));
}

export function text(value: unknown): string {
  if (value === null || value === undefined) return '';
  if (typeof value === 'string') return value;
  return typeof value === 'object' ? JSON.stringify(value) : String(value);
}

const whole = new Intl.NumberFormat('en-US'); // created once: that takes longer than formatting a hundred numbers
const minus = (shown: string) => shown.replace(/^-/, '−');

export function duration(seconds: number): string {
  if (!Number.isFinite(seconds) || seconds < 0) return '';
  if (seconds > 0 && seconds < 0.9995) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  seconds = Math.round(seconds);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.round((seconds % 86_400) / 3600)} h`;
}

export function ago(time: number, now = Date.now() / 1000): string {
  const past = now - time;
  return past < 5 ? 'now' : `${duration(past).split(' ').slice(0, 2).join(' ')} ago`;
}

/** A date and time, with seconds or milliseconds where others are so close. */
export function moment(time: number, apart = 60): string {
  return time ? new Date(time * 1000).toLocaleString(undefined, { year: 'numeric', month: 'short', day: 'numeric', hour: 'numeric', minute: '2-digit',
    second: apart < 60 ? '2-digit' : undefined, fractionalSecondDigits: apart < 1 ? 3 : undefined }) : '';
}

/** A time since the start that differs from those so far apart: `1 d 2 h 3 min`, `12 min 5 s`, `0.25 s`. */
export function elapsed(seconds: number, apart: number): string {
  if (seconds < 0) return `−${elapsed(-seconds, apart)}`;
  const digits = Math.max(0, Math.min(3, Math.ceil(-Math.log10(apart)))), parts: string[] = [];
  let left = Number(seconds.toFixed(digits));
  for (const [unit, name] of [[86_400, 'd'], [3600, 'h'], [60, 'min']] as const) {
    if (left >= unit || parts.length) parts.push(`${Math.floor(left / unit)} ${name}`);
    left %= unit;
    if (apart >= unit && parts.length > 1) return parts.join(' ');
  }
  return [...parts, `${Number(left.toFixed(digits))} s`].join(' ');
}

/** How many digits tell a place on an axis from the others on a stretch so long. */
export const digits = (value: number, span: number) => Math.max(5, Math.min(17, Math.ceil(Math.log10(Math.abs(value) / span)) + 5 || 0));
export const placed = (value: number, span: number) => Number(value.toPrecision(digits(value, span)));

/** `1 run`, `2 runs`. */
export function plural(count: number, word: string): string {
  return `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;
}

export function bytes(size: number): string {
  let unit = 0;
  for (; size >= 1024 && unit < 4; unit++) size /= 1024;
  return `${unit ? size.toFixed(1) : size} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][unit]}`;
}
