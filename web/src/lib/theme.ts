// The theme a person chose, kept by the browser; in a frame of another site, such as a notebook's, browsers may keep nothing.
export type Theme = 'auto' | 'light' | 'dark';

export function keptTheme(): Theme {
  try {
    const kept = localStorage.getItem('theme');
    return kept === 'light' || kept === 'dark' ? kept : 'auto';
  } catch {
    return 'auto';
  }
}

export function keepTheme(theme: Theme): void {
  try {
    if (theme === 'auto') localStorage.removeItem('theme');
    else localStorage.setItem('theme', theme);
  } catch {
    return; // it lasts as long as the page
  }
}
