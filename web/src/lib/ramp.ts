// Continuous color scales.

/** Color stops from low to high, each with at least 3:1 contrast to its background, distinguishable by lightness in any color vision. */
export const SCALES = { light: ['#2c115f', '#3b528b', '#21808d', '#3a8f52', '#a08400'], dark: ['#8677e6', '#4aa0e0', '#35c2a5', '#a6d84a', '#fde725'] };
export function colourOf(at: number, dark: boolean): string {
  const stops = dark ? SCALES.dark : SCALES.light, place = Math.min(0.9999, Math.max(0, at)) * (stops.length - 1), i = Math.floor(place), t = place - i;
  const mix = [1, 3, 5].map((k) => Math.round(parseInt(stops[i].slice(k, k + 2), 16) * (1 - t) + parseInt(stops[i + 1].slice(k, k + 2), 16) * t));
  return `rgb(${mix.join(',')})`;
}
