// The user's theme, kept in localStorage, which may be unavailable in a third-party iframe such as a notebook's.
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
    return; // lasts until the page is closed
  }
}
