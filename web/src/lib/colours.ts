// Sixteen colors per theme, distinguishable with normal, protan, deutan and tritan vision, each with at least 3:1 contrast to its
// background; the first eight differ the most. From the seventeenth run on, dash patterns are added. Hovering and the run list also
// identify a line.

export const LIGHT = ['#1da5a5', '#f9651a', '#3f1af9', '#6d2603', '#b27de8', '#1f3051', '#be7855', '#650495', '#d21e00', '#0f78ff', '#a5003c', '#3c7869', '#a50fd2', '#961e87', '#1e004b', '#2d0000'];
export const DARK = ['#6afbfb', '#bd9e05', '#fb6afb', '#9cd590', '#af1af9', '#f9f91a', '#178270', '#636f2a', '#e10f69', '#5ac3a5', '#b496c3', '#e1ffd2', '#875a96', '#96ff78', '#c31ed2', '#87a54b'];
export const COLOURS = 16;
export const DASHES: number[][] = [[], [6, 3], [2, 2], [8, 2, 2, 2]];

export const GROUNDS = {
  light: { ground: '#ffffff', ink: '#5b6370', grid: '#ecedee', faint: '#c3c8ce', colours: LIGHT },
  dark: { ground: '#15181c', ink: '#98a2ad', grid: '#23282e', faint: '#4a525b', colours: DARK },
};
export type Ground = (typeof GROUNDS)['light'];

export const colourAt = (ground: Ground, place: number) => ground.colours[place % COLOURS];
export const dashAt = (place: number) => DASHES[Math.floor(place / COLOURS) % DASHES.length];
