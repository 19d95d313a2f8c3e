// Smoothing that hides nothing: charts keep the raw line below it, and values that are not finite are skipped, not spread.

type Numbers = ArrayLike<number>;

/** Smooth with a centered kernel, which does not lag. `amount` (0 to 1) sets its width, up to a tenth of the points. The kernel is
 * Gaussian or, if `flat`, a running mean.
 *
 * Each value is a linear fit to the points around it. Where they are symmetric, that is their mean; at the ends, where one side is
 * missing, the fit follows the trend: a mean would bend, and a narrower kernel would end at the raw value. A wide kernel is placed a few
 * points apart, and what is between is on a line: the result cannot bend there. */
export function centred(y: Numbers, amount: number, flat = false): Float64Array {
  const reach = Math.max(1, (amount * amount * y.length) / 10), every = Math.max(1, Math.floor(reach / 16)), last = y.length - 1;
  const width = Math.ceil(reach * (flat ? 1.73 : 2.5)); // 1.73 reaches have the standard deviation of the Gaussian
  const kernel = Float64Array.from({ length: width + 1 }, (_, d) => (flat ? 1 : Math.exp(-0.5 * (d / reach) ** 2)));
  const out = new Float64Array(y.length);
  const fit = (i: number): number => {
    let weight = 0, lean = 0, spread = 0, sum = 0, slope = 0, zero = NaN; // differences from a value nearby keep all digits
    for (let j = Math.max(0, i - width); j <= Math.min(last, i + width); j++) {
      if (!Number.isFinite(y[j])) continue;
      if (Number.isNaN(zero)) zero = y[j];
      const d = j - i, k = kernel[Math.abs(d)], up = y[j] - zero;
      weight += k;
      lean += k * d;
      spread += k * d * d;
      sum += k * up;
      slope += k * d * up;
    }
    const whole = weight * spread - lean * lean;
    return zero + (whole > 1e-9 * weight * weight ? (spread * sum - lean * slope) / whole : sum / weight);
  };
  for (let from = 0, value = fit(0); from <= last; from += every) {
    const to = Math.min(last, from + every), next = fit(to);
    for (let i = from; i <= to; i++) out[i] = Number.isFinite(y[i]) ? value + (next - value) * ((i - from) / (to - from || 1)) : NaN;
    value = next;
  }
  return out;
}

/** Smooth with a debiased exponential moving average, for users who expect it. It lags. */
export function exponential(y: Numbers, amount: number): Float64Array {
  const keep = Math.min(0.999, amount);
  const out = new Float64Array(y.length);
  let sum = 0, weight = 0;
  for (let i = 0; i < y.length; i++) {
    if (Number.isFinite(y[i])) {
      sum = sum * keep + y[i] * (1 - keep);
      weight = weight * keep + 1 - keep;
      out[i] = sum / weight;
    } else out[i] = NaN;
  }
  return out;
}

/** Smooth each range separately, so that nothing leaks across a gap. */
export function smoothed(y: Numbers, parts: [number, number][], amount: number, kernel: string): Float64Array {
  const out = new Float64Array(y.length).fill(NaN);
  const all = Array.prototype.slice.call(y) as number[];
  for (const [a, b] of parts) out.set(kernel === 'ema' ? exponential(all.slice(a, b), amount) : centred(all.slice(a, b), amount, kernel === 'mean'), a);
  return out;
}
