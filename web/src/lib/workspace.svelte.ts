// The workspace: a user's choices in a project, saved automatically, with undo. A gateway stores it per user; otherwise the browser
// does. A link shows its own view, and leaves the workspace alone until the user keeps that view.
import { untrack } from 'svelte';
import { get, post, session } from './api';
import { DEFAULTS, place, read, view, write, type View } from './view.svelte';

const SOON = 800, PAUSE = 600, STEPS = 100; // ms until it is saved; ms between undo steps; maximum undo steps
const HERE = ['project', 'page', 'run']; // the location, which the Back button undoes
const PASSING = new Set([...HERE, 'zoom', 'zoomAxis', 'step', 'search', 'opSearch', 'lineSearch', 'tableSearch', 'full']); // transient: not saved

function without(names: Iterable<string>): string {
  const left: Record<string, unknown> = { ...view };
  for (const name of names) left[name] = DEFAULTS[name as keyof View] ?? null;
  return write(left as unknown as View);
}
const chosen = () => without(PASSING);
const stepNow = () => without(HERE);

class Workspace {
  past = $state.raw<string[]>([]);
  future = $state.raw<string[]>([]);
  linked = $state(false); // the view came from a link and is not saved
  error = $state('');
  #project = '';
  #now = '';
  #at = -Infinity;
  #saved = '';
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** Start: a bare URL opens the saved workspace; a URL with a view shows that view. */
  start(): () => void {
    this.#saved = kept(view.project);
    this.#arrived();
    const stop = $effect.root(() => {
      $effect(() => { const now = stepNow(), project = view.project; untrack(() => this.#note(project, now)); });
    });
    const leave = () => this.#save();
    const moved = () => { // after the view has followed the URL; a typed URL has no state
      const { state } = history;
      setTimeout(() => (state ? this.#mark(state.linked === true) : this.#arrived(false)));
    };
    addEventListener('pagehide', leave);
    addEventListener('popstate', moved);
    return () => { stop(); removeEventListener('pagehide', leave); removeEventListener('popstate', moved); };
  }

  /** Fetch the workspace from the gateway, if there is one, once the user is known. */
  async fetch(): Promise<void> {
    const project = view.project;
    if (!session.user || !project) return;
    const before = stepNow();
    try {
      const { fragment } = await get<{ fragment: string }>('api/workspace', { project });
      if (project !== view.project) return;
      this.#saved = fragment;
      if (before === stepNow()) this.#arrived();
    } catch (why) { this.error = (why as Error).message; }
  }

  /** Open another project with its saved workspace. */
  enter(project: string): void {
    this.#save();
    this.#saved = kept(project);
    const page = ['charts', 'table', 'alerts'].includes(view.page) ? view.page : 'charts';
    Object.assign(view, read(this.#saved), { project, page });
    this.#mark(false);
    void this.fetch();
  }

  #arrived(reloaded = history.state?.linked === false): void {
    const given = chosen(), says = !!given || !!view.full; // a full-screen chart may not exist in the saved view
    if (!says && this.#saved) { // keep the transient parts of the URL, such as a zoom
      const passing = Object.fromEntries([...PASSING].map((name) => [name, view[name as keyof View]]));
      this.#apply(this.#saved);
      Object.assign(view, passing);
    }
    this.#mark(says && !!this.#saved && given !== this.#saved && !reloaded);
  }
  #mark(linked: boolean): void { this.linked = place.linked = linked; }

  #note(project: string, now: string): void {
    if (project !== this.#project) {
      if (!this.#project) { this.#saved = kept(project); this.#arrived(); } // the URL named no project
      [this.#project, this.#now, this.past, this.future] = [project, stepNow(), [], []];
      return;
    }
    if (now === this.#now) return;
    const time = performance.now();
    if (time - this.#at > PAUSE || !this.past.length) this.past = [...this.past.slice(1 - STEPS), this.#now];
    [this.#now, this.#at, this.future] = [now, time, []];
    this.#soon();
  }
  #soon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#save(), SOON);
  }

  undo(): void { const to = this.past.at(-1); if (to !== undefined) { this.future = [...this.future, this.#now]; this.past = this.past.slice(0, -1); this.#back(to); } }
  redo(): void { const to = this.future.at(-1); if (to !== undefined) { this.past = [...this.past, this.#now]; this.future = this.future.slice(0, -1); this.#back(to); } }
  #back(to: string) {
    this.#apply(to);
    this.#now = stepNow();
    this.#at = -Infinity;
    this.#soon();
  }
  /** Apply a fragment without changing the project, page or run. */
  #apply(fragment: string) { Object.assign(view, read(fragment), { project: view.project, page: view.page, run: view.run }); }

  show(fragment: string): void { Object.assign(view, read(fragment), { project: view.project }); }
  reset(): void { this.#apply(''); this.#mark(false); }
  /** After opening a link: save its view as the workspace, or (`leave`) return to the workspace. */
  adopt(): void { this.#mark(false); this.#save(); }
  leave(): void { this.#mark(false); this.#apply(this.#saved); }

  #save(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    const now = chosen(), project = view.project;
    if (this.linked || !project || project !== this.#project || now === this.#saved) return;
    this.#saved = now;
    if (!session.user) { keep(project, now); return; }
    post('api/keep', { project, fragment: now }, true).then(() => (this.error = ''), (why: Error) => { this.error = why.message; this.#saved = ''; });
  }
}

// Browsers store it per path of a dashboard; third-party iframes may have no storage.
const name = (project: string) => `workspace ${location.pathname} ${project}`;
function kept(project: string): string {
  try { return localStorage.getItem(name(project)) ?? ''; } catch { return ''; }
}
function keep(project: string, fragment: string): void {
  try {
    if (fragment) localStorage.setItem(name(project), fragment);
    else localStorage.removeItem(name(project));
  } catch { return; } // lasts until the page is closed
}

export const workspace = new Workspace();
