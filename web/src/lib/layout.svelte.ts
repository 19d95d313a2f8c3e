// Layout state. On phones the run list is a drawer; elsewhere it is a sidebar of adjustable width.
export const NARROW = '(max-width: 720px)';
export const LIST = { usual: 300, least: 180, most: 900 };

class Layout {
  narrow = $state(false);
  drawer = $state(false);

  watch(): () => void {
    const wide = matchMedia(NARROW);
    const see = () => { this.narrow = wide.matches; this.drawer = false; };
    see();
    wide.addEventListener('change', see);
    return () => wide.removeEventListener('change', see);
  }
}
export const layout = new Layout();
